/**
 * RMSNorm, whole rows or groups of columns (docs/spec/language-model.md §1.5; Mamba-2's gated norm is the grouped
 * form).
 */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

/**
 * y = x * rsqrt(mean(x²) + epsilon) * weight over runs of `groupSize` columns (default: the whole row).
 * x_TW f32 or bf16 → y_TW of the same type.
 */
export function rmsNorm(tape: Tape, x: Tensor, weight: Parameter, epsilon: number, groupSize = x.width): Tensor {
	const { device } = tape;
	const rows = x.rows;
	const width = x.width;
	const rstd = Tensor.empty(device, [rows, width / groupSize]);
	const y = tape.output(Tensor.empty(device, x.shape, x.dtype), x.gradient !== null || weight.trainable);
	const shape = {
		rows,
		width,
		group_size: groupSize,
		x_stride: x.stride,
		dtype: x.dtypeCode,
		weight_dtype: weight.value.dtypeCode,
	};
	device.run("rms_norm_forward", {
		...shape,
		x,
		residual: null,
		weight: weight.value,
		sum: null,
		y,
		rstd,
		y_stride: width,
		epsilon,
	});
	tape.record({
		name: "rms_norm",
		outputs: [y],
		keep: [x],
		own: [rstd],
		parameters: [weight],
		backward: ([dy]) => {
			const compute = (dresidual: Tensor | null, dx: Tensor) =>
				device.run("rms_norm_backward", {
					...shape,
					dy: dy!,
					x,
					weight: weight.value,
					rstd,
					dresidual,
					dx,
					dweight: weight.mainGradient,
					dy_stride: dy!.stride,
					dx_stride: dx.stride,
				});
			if (x.gradient) {
				x.gradient.fuse(compute);
			} else {
				using unused = Tensor.empty(device, x.shape, x.dtype, "workspace");
				compute(null, unused);
			}
		},
	});
	return y;
}
