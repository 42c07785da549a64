/**
 * RMSNorm, whole rows or groups of columns (docs/spec/language-model.md §1.5; Mamba-2's gated norm is the grouped
 * form).
 */
import { type Mask, maskArguments, maskGradients, maskTensors, wantsGradient } from "../column-mask.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

/**
 * y = x * rsqrt(mean(x²) + epsilon) * weight over runs of `groupSize` columns (default: the whole row).
 * x_TW f32 or bf16 → y_TW of the same type. `mask`: its columns multiply x before, its scale y (docs/spec/elastic.md §9).
 */
export function rmsNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	epsilon: number,
	{ groupSize = x.width, mask = null }: { readonly groupSize?: number | undefined; readonly mask?: Mask | null } = {},
): Tensor {
	const { device } = tape;
	const rows = x.rows;
	const width = x.width;
	const rstd = Tensor.empty(device, [rows, width / groupSize]);
	const y = tape.output(Tensor.empty(device, x.shape, x.dtype), wantsGradient(x.gradient, mask) || weight.trainable);
	const masks = mask && maskArguments(mask, width);
	const shape = {
		rows,
		width,
		group_size: groupSize,
		x_stride: x.stride,
		dtype: x.dtypeCode,
		weight_dtype: weight.value.dtypeCode,
	};
	const forward = { ...shape, x, weight: weight.value, y, rstd, y_stride: width, epsilon };
	if (masks) device.run("masked_rms_norm_forward", { ...forward, ...masks });
	else device.run("rms_norm_forward", { ...forward, residual: null, sum: null });
	tape.record({
		name: "rms_norm",
		outputs: [y],
		keep: [x, ...(mask ? maskTensors(mask) : [])],
		own: [rstd],
		parameters: [weight],
		backward: ([dy]) => {
			const compute = (dresidual: Tensor | null, dx: Tensor) => {
				const strides = { dy_stride: dy!.stride, dx_stride: dx.stride };
				const operands = { dy: dy!, x, weight: weight.value, rstd, dresidual, dx, dweight: weight.mainGradient };
				if (mask) {
					device.run("masked_rms_norm_backward", {
						...shape,
						...operands,
						...strides,
						...masks!,
						...maskGradients(mask),
					});
				} else device.run("rms_norm_backward", { ...shape, ...operands, ...strides });
			};
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
