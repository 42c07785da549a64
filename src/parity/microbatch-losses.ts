/** Mean next-token losses of a reference's own microbatches in one step, however the layout cuts the batch. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { Run } from "../train/assemble.ts";
import { lossTokens } from "../train/loss-weights.ts";
import type { MicrobatchObserver } from "../train/rank-passes.ts";
import { reduceHost } from "./reduce-host.ts";
import type { BatchSizes } from "./token-batches.ts";
import type { Plan } from "./verify/plan.ts";

export class MicrobatchLosses {
	/** Σ mask · loss of every microbatch of the reference. */
	readonly #sums: Float64Array;

	constructor(
		private readonly run: Run,
		private readonly plan: Plan,
		private readonly sizes: BatchSizes,
		/** Of this rank's lane. */
		private readonly microbatches: readonly ImageTextMicrobatch[],
	) {
		this.#sums = new Float64Array(sizes.microbatches);
	}

	readonly observe: MicrobatchObserver = (name, value, microbatch) => {
		if (name !== "per_token_loss" || !this.run.state.lossOwner!.counts) return;
		const { topology, microbatches, microBatchSize } = this.plan;
		const { batch, seq } = this.sizes;
		const lane = topology.language.coordinates(this.run.rank).dp;
		const first = (lane * microbatches + microbatch) * microBatchSize * seq;
		const { lossMask } = this.microbatches[microbatch]!.text;
		for (const [token, loss] of value.toFloat32().entries())
			this.#sums[Math.floor((first + token) / (batch * seq))]! += loss * lossMask[token]!;
	};

	/** Σ mask · loss / Σ mask of each. `tokens`: Σ mask of each. Every rank of the run calls this together, once. */
	means(tokens: readonly number[]): number[] {
		const { world, scalars } = this.run.state;
		reduceHost(world, scalars.device, this.#sums);
		return tokens.map((count, at) => this.#sums[at]! / Math.max(1, count));
	}
}

/** Loss tokens of each of the reference's microbatches, from the samples of a step. */
export function tokensOfMicrobatches(samples: readonly ImageTextMicrobatch[], { batch, microbatches }: BatchSizes) {
	return Array.from({ length: microbatches }, (_, microbatch) =>
		samples.slice(microbatch * batch, (microbatch + 1) * batch).reduce((sum, { text }) => sum + lossTokens(text), 0),
	);
}
