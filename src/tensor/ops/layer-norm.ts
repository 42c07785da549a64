/** LayerNorm over whole rows (vision encoders). */
import { fuseGradient } from "../gradient.ts";
import type { Parameter } from "../parameter.ts";
import type { ResidualSum } from "../residual-sum.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

/**
 * y = (x - mean) * rsqrt(variance + epsilon) * weight + bias, biased variance. x_TW contiguous → y_TW of its type. `sum`: the
 * sum that x is, whose values are written in the same pass if they are not there yet; the rounded values are normalised, so
 * that the bits are the same either way.
 */
export function layerNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	bias: Parameter,
	epsilon: number,
	{ sum = null }: { readonly sum?: ResidualSum | null } = {},
): Tensor {
	if (!x.contiguous) throw new RangeError(`layerNorm takes a contiguous tensor, not rows ${x.stride} apart.`);
	const { device } = tape;
	const mean = Tensor.empty(device, [x.rows]);
	const rstd = Tensor.empty(device, [x.rows]);
	const wanted = x.gradient !== null || weight.trainable || bias.trainable;
	const y = tape.output(Tensor.empty(device, x.shape, x.dtype), wanted);
	const shape = {
		rows: x.rows,
		width: x.width,
		dtype: x.dtypeCode,
		weight_dtype: weight.value.dtypeCode,
	};
	{
		if (sum?.masked) sum.written();
		using addends = sum?.takeAddends() ?? null;
		const added = addends
			? { x: addends.branch, residual: addends.residual, sum: x }
			: { x, residual: null, sum: null };
		const parameters = { weight: weight.value, bias: bias.value, epsilon };
		device.run("layer_norm_forward", { ...shape, ...added, ...parameters, y, mean, rstd });
	}
	tape.record({
		name: "layer_norm",
		outputs: [y],
		keep: [x],
		own: [mean, rstd],
		parameters: [weight, bias],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			fuseGradient(x, (dresidual, dx) => {
				if (!dx.contiguous) throw new RangeError("layerNorm cannot write its gradient into a strided window.");
				device.run("layer_norm_backward", {
					...shape,
					dy,
					x,
					weight: weight.value,
					mean,
					rstd,
					dresidual,
					dx,
					dweight: weight.mainGradient,
					dbias: bias.mainGradient,
				});
			});
		},
	});
	return y;
}
