/** The router's balancing losses of one microbatch (docs/spec/language-model.md §4.4). */
import type { Group } from "../../parallel/group.ts";
import { balancingLoss, type RouterStatistics } from "../../tensor/ops/router.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { RouterState } from "./router-state.ts";

/**
 * Adds the gradient of every configured loss to the routing's. Weights are those of a per-token loss: the loss of a
 * microbatch counts as often as it has `tokens`, and the step divides by its loss tokens. Ranks that share the
 * microbatch's tokens sum their counts; each forms the loss of its own scores, and those add up to the loss.
 */
export function addBalancingLosses(
	tape: Tape,
	router: RouterState,
	statistics: RouterStatistics,
	tokens: number,
	tp: Group,
): void {
	if (tp.size > 1) {
		tp.allReduce(statistics.counts).wait();
		tp.allReduce(statistics.tokens).wait();
	}
	for (const { type, coefficient } of router.moe.balancing) {
		const options = { coefficient, gradientScale: tokens / router.options.passes, loss: router.sums.get(type)! };
		switch (type) {
			case "seq_aux_loss":
				balancingLoss(tape, statistics, options);
				break;
			case "aux_loss": {
				using pooled = statistics.pooled();
				balancingLoss(tape, pooled, options);
				break;
			}
			case "global_aux_loss": {
				using pooled = statistics.pooled();
				if (tape.replaying) router.readAverageCounts(pooled.counts);
				else router.averageCounts(pooled.counts);
				balancingLoss(tape, pooled, options);
				break;
			}
		}
	}
}
