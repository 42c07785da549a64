/**
 * RMSNorm, whole rows or groups of columns (docs/spec/language-model.md §1.5; Mamba-2's gated norm is the grouped
 * form).
 */

import type { OperationArgs } from "../../native/device.ts";
import { type Mask, maskArguments, maskGradients, maskTensors, wantsGradient } from "../column-mask.ts";
import { fuseGradient } from "../gradient.ts";
import type { Parameter } from "../parameter.ts";
import type { ResidualSum } from "../residual-sum.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

const noMask: Mask = { columns: null, scale: null };

export interface RmsNormOptions {
	/** Columns that are normalised together; default: the whole row. */
	readonly groupSize?: number | undefined;
	/** Column factors multiply x before the norm, the scale multiplies y (docs/spec/elastic.md §9). */
	readonly mask?: Mask | null;
	/** Whether the gain is 1 + weight, not the weight; without a mask. */
	readonly zeroCentred?: boolean;
	/** The residual sum whose value x is; its values are written in the same pass if they are not there yet. */
	readonly sum?: ResidualSum | null;
}

/**
 * y = x * rsqrt(mean(x²) + epsilon) * gain over runs of `groupSize` columns. x_TW f32 or bf16 → y_TW of the same type. The
 * values of a residual sum are rounded before they are normalised, so y has the same bits whether the sum is written here or before.
 */
export function rmsNorm(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	epsilon: number,
	{ groupSize = x.width, mask = null, zeroCentred = false, sum = null }: RmsNormOptions = {},
): Tensor {
	if (zeroCentred && mask) throw new RangeError("rmsNorm of masked columns has no zero-centred weight.");
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
	const offset = weightOffset(zeroCentred);
	runForward(x, sum, masks, { ...shape, ...offset, weight: weight.value, y, rstd, y_stride: width, epsilon });
	tape.record({
		name: "rms_norm",
		outputs: [y],
		keep: [x, ...(mask ? maskTensors(mask) : [])],
		own: [rstd],
		parameters: [weight],
		backward: ([dy]) => {
			fuseGradient(x, (dresidual, dx) => {
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
				} else device.run("rms_norm_backward", { ...shape, ...offset, ...operands, ...strides });
			});
		},
	});
	return y;
}

/** Added to a norm's weight. */
export function weightOffset(zeroCentred: boolean) {
	return { weight_offset: zeroCentred ? 1 : 0 };
}

/** Normalises x and, where its sum is not written yet, writes that too. */
function runForward(
	x: Tensor,
	sum: ResidualSum | null,
	masks: ReturnType<typeof maskArguments> | null,
	args: Omit<OperationArgs<"rms_norm_forward">, "x" | "residual" | "sum">,
): void {
	using addends = sum?.takeAddends() ?? null;
	const added = addends ? { x: addends.branch, residual: addends.residual, sum: x } : { x, residual: null, sum: null };
	if (!masks && !addends?.mask) {
		x.device.run("rms_norm_forward", { ...args, ...added });
		return;
	}
	const ofBranch = maskArguments(addends?.mask ?? noMask, x.width);
	const factors = { x_factors: ofBranch.factors, x_scale: ofBranch.scale };
	x.device.run("masked_rms_norm_forward", {
		...args,
		...added,
		...(masks ?? maskArguments(noMask, x.width)),
		...factors,
	});
}
