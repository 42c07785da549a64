/**
 * --calculate-per-token-loss: what mean a step's gradient is of, as the weight of each microbatch in the sum that is differentiated
 * (docs/spec/runtime.md §3.3, §3.4). Losses and routers read weights from here, and nothing else depends on the mode.
 */
import { lossTokens, type Microbatch } from "../data/microbatch.ts";

/**
 * tokens: the mean over the loss tokens of the global batch. microbatches: the mean of the microbatches' own token means, Megatron's
 * default.
 */
export type LossMean = "tokens" | "microbatches";

/** Weights of means over a microbatch. */
export interface MicrobatchWeights {
	/** Of a mean over its loss tokens: the next-token loss, and what guests add to it. */
	readonly loss: number;
	/** Of a mean over all its tokens: balancing losses and z-losses of routers. */
	readonly routers: number;
}

/** The weights of a step's microbatches. */
export class LossWeights {
	/** `step`: microbatches of a lane, and data lanes of the language model. */
	constructor(
		readonly mean: LossMean,
		private readonly step: { readonly microbatches: number; readonly lanes: number },
	) {}

	of({ ids, lossMask }: Pick<Microbatch, "ids" | "lossMask">): MicrobatchWeights {
		const tokens = lossTokens({ lossMask });
		if (this.mean === "tokens") return { loss: tokens, routers: ids.length };
		const share = 1 / this.step.microbatches;
		return { loss: tokens === 0 ? 0 : share, routers: share };
	}

	/** The fp32 factor for the gradients of the weighted sum over all lanes, whose loss tokens are `tokens`. */
	scale(tokens: number): number {
		return Math.fround(1 / (this.mean === "tokens" ? Math.max(1, tokens) : this.step.lanes));
	}
}
