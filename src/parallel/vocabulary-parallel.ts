/** Cross-entropy over a vocabulary that is sharded over a tensor-parallel group. */
import { CrossEntropyStatistics, type FloatDtype, Tensor } from "../tensor/index.ts";
import type { Group } from "./group.ts";

/** All-gathers the shards' statistics: [1, T] of each rank → [tp, T]. */
export function gatherStatistics(own: CrossEntropyStatistics, tp: Group): CrossEntropyStatistics {
	const gather = (part: Tensor) => {
		const all = Tensor.empty(part.device, [tp.size, part.width], part.dtype as FloatDtype);
		return { all, pending: tp.allGather(part, all) };
	};
	const parts = [own.maximum, own.sumExp, own.targetLogit, own.found].map(gather);
	for (const { pending } of parts) pending.wait();
	const [maximum, sumExp, targetLogit, found] = parts.map(({ all }) => all) as [Tensor, Tensor, Tensor, Tensor];
	return new CrossEntropyStatistics(maximum, sumExp, targetLogit, found);
}
