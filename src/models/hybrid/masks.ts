/**
 * Where an elastic model's masks stand in the hybrid language model (docs/spec/elastic.md §9). A microbatch has masks of its
 * own; without any the model is the parent. A norm over masked channels has another ε and a factor behind it, which make it
 * the norm over the channels that are left.
 */

import type { ChannelMask } from "../../tensor/ops/causal-conv1d.ts";
import { type ColumnMask, maskColumns, type ScoreMask } from "../../tensor/ops/mask-columns.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";

/** A norm over masked columns. */
export interface NormMask {
	readonly epsilonFactor: number;
	/** Of what it puts out, one ring. */
	readonly scale: ColumnMask;
}

/** Masks of one layer; of a kind of layers that it is not of, null. */
export interface LayerMasks {
	readonly mamba: {
		/** Columns of z, x, B, C and dt. */
		readonly projection: ColumnMask;
		readonly convolution: ChannelMask;
		readonly norm: NormMask;
	} | null;
	readonly attention: {
		/** Columns of query, key and value heads. */
		readonly projection: ColumnMask;
		readonly attended: ColumnMask;
	} | null;
	readonly moe: {
		readonly scores: ScoreMask | null;
		/** Columns between an expert's projections, in order. */
		readonly channels: readonly ColumnMask[];
	} | null;
	/** Of all that the layer adds, one ring; null: it is never left out. */
	readonly keep: ColumnMask | null;
}

export interface ModelMasks {
	/** Columns of hidden states; null: all of them. */
	readonly hidden: ColumnMask | null;
	readonly norm: NormMask | null;
	/** Whether embedded tokens are masked. */
	readonly masksEmbedding: boolean;
	/** Layers of the main part by number. */
	readonly layer: (index: number) => LayerMasks;
}

/** x, masked where there is a mask. */
export function masked(tape: Tape, x: Tensor, mask: ColumnMask | null | undefined): Tensor {
	return mask ? maskColumns(tape, x, mask) : x.share();
}

/** The norm of columns that may be masked. */
export function maskedNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	epsilon: number,
	mask: NormMask | null | undefined,
	groupSize?: number,
): Tensor {
	using normed = rmsNorm(tape, x, weight, epsilon * (mask?.epsilonFactor ?? 1), groupSize);
	return masked(tape, normed, mask?.scale);
}
