/** The norm of hidden states that the configuration names: RMSNorm, masked in elastic models, or LayerNorm. */
import { type ColumnMask, layerNorm, type ResidualSum, type Tape, type Tensor } from "../../tensor/index.ts";
import { normBias } from "./kinds/kind.ts";
import type { LayerContext } from "./layer-context.ts";
import { maskedNorm, type NormMask } from "./masks.ts";

/** The norm of x_TH whose weight `weights` gives by `name`. `sum`: the residual sum that x is, which the norm may write. */
export function norm(
	tape: Tape,
	{ config, weights }: Pick<LayerContext, "config" | "weights">,
	x: Tensor,
	name: string,
	{
		mask = null,
		columns = null,
		sum = null,
	}: { readonly mask?: NormMask | null; readonly columns?: ColumnMask | null; readonly sum?: ResidualSum | null } = {},
): Tensor {
	const { normalization, normEpsilon, zeroCentredNorms: zeroCentred } = config;
	if (normalization === "RMSNorm") {
		return maskedNorm(tape, x, weights(name), normEpsilon, mask, { columns, sum, zeroCentred });
	}
	return layerNorm(tape, x, weights(name), weights(normBias(name)), normEpsilon, { sum });
}
