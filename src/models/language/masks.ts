/**
 * Where an elastic model's masks apply in the hybrid language model (docs/spec/elastic.md §9). Each microbatch has masks of its
 * own; without masks the model is the parent. A norm over masked columns has another ε and an output scale, which make it the
 * norm over the remaining columns. Column factors commute with sums over rows, so most masks are fused into neighbouring
 * operations: norms, residual sums, the copy of experts' rows and their sum, activations.
 */

import {
	add,
	addLater,
	addMaskedColumns,
	addMaskedColumnsLater,
	type ChannelMask,
	type ColumnMask,
	type Mask,
	maskColumns,
	type Parameter,
	type ResidualSum,
	type RmsNormOptions,
	rmsNorm,
	type ScaleMask,
	type ScoreMask,
	type Tape,
	type Tensor,
} from "../../tensor/index.ts";

/** A norm over masked columns. */
export interface NormMask {
	readonly epsilonFactor: number;
	/** Scale of the norm's output, √(kept / all columns). */
	readonly scale: ScaleMask;
}

/** Masks of one layer; a field is null if the layer is of another kind. */
export interface LayerMasks {
	readonly mamba: {
		/** Masks of the columns of z and dt. */
		readonly gate: ColumnMask;
		readonly step: ColumnMask;
		/** Factors of the weight are squared: the convolution's input is masked by the same factors. */
		readonly convolution: ChannelMask;
		readonly norm: NormMask;
	} | null;
	readonly attention: {
		/** Mask of the columns of query, key and value heads. */
		readonly projection: ColumnMask;
		readonly attended: ColumnMask;
	} | null;
	readonly moe: {
		readonly scores: ScoreMask | null;
		/** Share of the tokens that each expert gets when they are balanced, proportional to its factor; null: all alike. */
		readonly shares: Float64Array | null;
		/** Mask between an expert's projections; null: none. */
		readonly channels: Mask | null;
	} | null;
	/** Scale of the layer's branch, 0 to skip the layer; null: the layer is never skipped. */
	readonly keep: ScaleMask | null;
}

export interface ModelMasks {
	/** Mask of the columns of hidden states; null: all are kept. */
	readonly hidden: ColumnMask | null;
	readonly norm: NormMask | null;
	/** Whether the embedding is masked. */
	readonly masksEmbedding: boolean;
	/** Masks of a layer of the main part by its index. */
	readonly layer: (index: number) => LayerMasks;
}

/** x times the mask, or x itself without one. */
export function masked(tape: Tape, x: Tensor, columns: ColumnMask | null | undefined): Tensor {
	return columns ? maskColumns(tape, x, { columns, scale: null }) : x.share();
}

/** a + b, with b masked if there is a mask. */
export function addMasked(tape: Tape, a: Tensor, b: Tensor, columns: ColumnMask | null | undefined): Tensor {
	return columns ? addMaskedColumns(tape, a, b, { columns, scale: null }) : add(tape, a, b);
}

/** x + branch, with the branch masked if there is a mask; the sum may be written by the next norm. */
export function addBranch(
	tape: Tape,
	x: Tensor,
	branch: Tensor,
	columns: ColumnMask | null | undefined,
	scale: ScaleMask | null | undefined,
): ResidualSum {
	return columns || scale
		? addMaskedColumnsLater(tape, x, branch, { columns: columns ?? null, scale: scale ?? null })
		: addLater(tape, x, branch);
}

/** The RMS norm of x, masked if there are masks. `sum`: the residual sum that x is, which the norm may write. */
export function maskedNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	epsilon: number,
	mask: NormMask | null | undefined,
	{ columns = null, ...options }: { readonly columns?: ColumnMask | null } & Omit<RmsNormOptions, "mask"> = {},
): Tensor {
	return rmsNorm(tape, x, weight, epsilon * (mask?.epsilonFactor ?? 1), {
		...options,
		mask: mask || columns ? { columns, scale: mask?.scale ?? null } : null,
	});
}
