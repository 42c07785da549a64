/** batches.safetensors of a reference folder of a language model that Megatron-LM trained. */
import { join } from "node:path";
import { openSafetensors } from "../checkpoint/index.ts";
import { type ImageTextMicrobatch, lossTokens, withoutImages } from "../data/microbatch.ts";
import { UserError } from "../system/errors.ts";
import type { Run } from "../train/assemble.ts";
import type { MicrobatchObserver } from "../train/rank-passes.ts";
import { reduceHost } from "./probe-sums.ts";
import type { Plan } from "./verify/samples.ts";

interface BatchSizes {
	readonly batch: number;
	readonly microbatches: number;
	readonly seq: number;
}

/**
 * tokens i32 [steps, microbatches, batch, seq + 1] and loss_mask u8 [steps, microbatches, batch, seq] as samples of every step.
 * Throws where type or shape differ.
 */
export function readTokenBatches(
	folder: string,
	{ batch, microbatches, seq }: BatchSizes,
	steps: number,
): ImageTextMicrobatch[][] {
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const read = (name: string, dtype: string, width: number) => {
		const { dtype: stored, shape } = file.information(name);
		const wanted = [steps, microbatches, batch, width];
		if (stored !== dtype || String(shape) !== String(wanted)) {
			throw new UserError(`${name} in ${file.path} is ${stored} [${shape}]; config.json needs ${dtype} [${wanted}].`);
		}
		return file.read(name);
	};
	const tokens = read("tokens", "I32", seq + 1) as Int32Array;
	const masks = read("loss_mask", "U8", seq) as Uint8Array;
	return Array.from({ length: steps }, (_, step) =>
		Array.from({ length: microbatches * batch }, (_, row) => {
			const sample = step * microbatches * batch + row;
			const ids = tokens.subarray(sample * (seq + 1), (sample + 1) * (seq + 1));
			return withoutImages({
				ids: ids.slice(0, -1),
				labels: ids.slice(1),
				lossMask: Float32Array.from(masks.subarray(sample * seq, (sample + 1) * seq)),
				lengths: [seq],
			});
		}),
	);
}

// Mean next-token losses of a reference's own microbatches in one step, however the layout cuts the batch.

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
		const { dp: lane, cp } = topology.language.coordinates(this.run.rank);
		const before = cp * value.elements;
		const first = (lane * microbatches + microbatch) * microBatchSize * seq + before;
		const { lossMask } = this.microbatches[microbatch]!.text;
		for (const [token, loss] of value.toFloat32().entries())
			this.#sums[Math.floor((first + token) / (batch * seq))]! += loss * lossMask[before + token]!;
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
