/**
 * Tensor-parallel projections of the encoder with their adapters (lora.ts). Every rank of the encoder has all rows, and gradients of
 * replicated matrices are not added over ranks, so that a and b have whole gradients here: the product with a, R wide, is whole on
 * each rank before it meets b.
 */
import {
	columnParallelLinear,
	copyToTensorParallel,
	type Group,
	reduceFromTensorParallel,
	rowParallelLinear,
} from "../parallel/index.ts";
import {
	addScaledProduct,
	type LinearOptions,
	type LowRank,
	linear,
	type Parameter,
	type Tape,
	type Tensor,
} from "../tensor/index.ts";
import { adapterName, adapterScale, isTarget, type LoraConfig } from "./lora.ts";

/** A projection's parameters on this rank. */
export interface AdaptedProjection {
	readonly weight: Parameter;
	readonly bias: Parameter | null;
	/** null: it has no adapter. */
	readonly adapter: LowRank | null;
}

/** The projection whose weight has the name `${name}.weight`; `bias`: whether it has one. */
export function projectionOf(
	weights: (name: string) => Parameter,
	name: string,
	{ lora, bias }: { readonly lora: LoraConfig | null; readonly bias: boolean },
): AdaptedProjection {
	const weight = `${name}.weight`;
	const adapted = lora !== null && isTarget(lora, weight);
	return {
		weight: weights(weight),
		bias: bias ? weights(`${name}.bias`) : null,
		adapter: adapted
			? { a: weights(adapterName(weight, "a")), b: weights(adapterName(weight, "b")), scale: adapterScale(lora) }
			: null,
	};
}

/** columnParallelLinear with the adapter, which needs `gelu` to be null. */
export function adaptedColumns(
	tape: Tape,
	x: Tensor,
	{ weight, bias, adapter }: AdaptedProjection,
	tp: Group,
	options: Pick<LinearOptions, "gelu"> = {},
): Tensor {
	const base = columnParallelLinear(tape, x, weight, bias, tp, options);
	if (adapter === null) return base;
	using h = linear(tape, x, adapter.a);
	using entering = copyToTensorParallel(tape, h, tp);
	return addScaledProduct(tape, base, entering, adapter);
}

/** rowParallelLinear with the adapter, which needs `geluOf` to be null. */
export function adaptedRows(
	tape: Tape,
	x: Tensor,
	{ weight, bias, adapter }: AdaptedProjection,
	tp: Group,
	options: Pick<LinearOptions, "geluOf"> = {},
): Tensor {
	const base = rowParallelLinear(tape, x, weight, bias, tp, options);
	if (adapter === null) return base;
	using h = reduceFromTensorParallel(linear(tape, x, adapter.a), tp);
	return addScaledProduct(tape, base, h, adapter);
}
