/** Cross-entropy of a language model whose vocabulary may be sharded over tensor-parallel ranks. */
import type { HybridModel } from "../models/language/model.ts";
import { gatherStatistics } from "../parallel/index.ts";
import { type CrossEntropyStatistics, crossEntropy, type Tape, type Tensor } from "../tensor/index.ts";

/** logits_T(V/tp), labels_T → loss_T of each token, equal on all tensor-parallel ranks. */
export function tokenLoss(tape: Tape, model: HybridModel, logits: Tensor, labels: Tensor): Tensor {
	const { tp } = model.parallel;
	return crossEntropy(tape, logits, labels, {
		shard: model.vocabularyShard,
		// A held-out loss is the cross-entropy alone; the z-losses of routers are left out of it too.
		zLoss: tape.training ? model.config.zLossCoefficient : 0,
		roundBf16: model.config.crossEntropyRoundsBf16,
		...(tp.size === 1 ? {} : { gather: (own: CrossEntropyStatistics) => gatherStatistics(own, tp) }),
	});
}
