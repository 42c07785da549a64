/**
 * The load-balancing losses of one router (aux_loss, seq_aux_loss, global_aux_loss) of a microbatch (docs/spec/language-model.md
 * §4.4); pooled-balancing.ts has that of all.
 */
import type { Group } from "../../parallel/index.ts";
import { axpby, balancingLoss, type RouterStatistics, type Tape } from "../../tensor/index.ts";
import type { RouterState } from "./router-state.ts";

/**
 * Adds the gradients of the configured losses, times `weight`, to the routing's. `ranks`, which share the microbatch, sum their token
 * counts; each computes the loss of its own scores, and these add up to the loss.
 */
export function addBalancingLosses(
	tape: Tape,
	router: RouterState,
	statistics: RouterStatistics,
	weight: number,
	ranks: Group,
): void {
	if (ranks.size > 1) {
		ranks.allReduce(statistics.counts).wait();
		ranks.allReduce(statistics.tokens).wait();
	}
	for (const { type, coefficient } of router.moe.balancing) {
		if (type === "pooled_aux_loss") continue;
		const options = { coefficient, gradientScale: weight / router.options.passes, loss: router.sums.get(type)! };
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
				// When a part is recomputed, later microbatches may have been counted already.
				using average = tape.once(() => {
					router.averageCounts(pooled.counts);
					return pooled.counts.share();
				});
				if (tape.replaying) axpby(average, pooled.counts, 1, 0);
				balancingLoss(tape, pooled, options);
				break;
			}
		}
	}
}
