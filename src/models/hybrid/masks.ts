/**
 * Where an elastic model's masks stand in the hybrid language model (docs/spec/elastic.md §9). A microbatch has masks of its
 * own; without any the model is the parent. A norm over masked channels has another ε and a factor behind it, which make it
 * the norm over the channels that are left. Factors of columns commute with sums over rows, so that most masks stand in the
 * operations beside them: in norms, in residual sums, before experts' rows are copied and behind their sum, in activations.
 */

import type { ColumnMask, Mask, ScaleMask } from "../../tensor/column-mask.ts";
import { add, addLater } from "../../tensor/ops/add.ts";
import type { ChannelMask } from "../../tensor/ops/causal-conv1d.ts";
import { addMaskedColumns, addMaskedColumnsLater, maskColumns, type ScoreMask } from "../../tensor/ops/mask-columns.ts";
import { rmsNorm } from "../../tensor/ops/rms-norm.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { ResidualSum } from "../../tensor/residual-sum.ts";
import type { Tape } from "../../tensor/tape.ts";
import type { Tensor } from "../../tensor/tensor.ts";

/** A norm over masked columns. */
export interface NormMask {
	readonly epsilonFactor: number;
	/** Scale of the norm's output. */
	readonly scale: ScaleMask;
}

/** Masks of one layer; null for the kinds of layers that it does not belong to. */
export interface LayerMasks {
	readonly mamba: {
		/** Columns of z and of dt. */
		readonly gate: ColumnMask;
		readonly step: ColumnMask;
		/** The weight's factors are squares: they stand for those of x as well. */
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
		/** Between an expert's projections; null: none. */
		readonly channels: Mask | null;
	} | null;
	/** Scale of the layer's branch, 0 to leave the layer out; null: it is never left out. */
	readonly keep: ScaleMask | null;
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
export function masked(tape: Tape, x: Tensor, columns: ColumnMask | null | undefined): Tensor {
	return columns ? maskColumns(tape, x, { columns, scale: null }) : x.share();
}

/** The sum of a and b; b may be masked. */
export function addMasked(tape: Tape, a: Tensor, b: Tensor, columns: ColumnMask | null | undefined): Tensor {
	return columns ? addMaskedColumns(tape, a, b, { columns, scale: null }) : add(tape, a, b);
}

/** The sum of x and a branch, which may be masked. The next norm may write the sum. */
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

/** The norm of columns that may be masked, with the masks of what enters. `sum`: the sum that x is. */
export function maskedNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	epsilon: number,
	mask: NormMask | null | undefined,
	{
		columns = null,
		groupSize,
		sum = null,
	}: { readonly columns?: ColumnMask | null; readonly groupSize?: number; readonly sum?: ResidualSum | null } = {},
): Tensor {
	return rmsNorm(tape, x, weight, epsilon * (mask?.epsilonFactor ?? 1), {
		groupSize,
		sum,
		mask: mask || columns ? { columns, scale: mask?.scale ?? null } : null,
	});
}
