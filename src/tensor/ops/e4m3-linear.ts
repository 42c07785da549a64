/**
 * Y = X Wᵀ (+ b) with operands rounded to e4m3 (docs/spec/moe-performance.md §1.7): X and the gradient of Y in runs of 128 columns, W in
 * blocks of 128 × 128. The gradient of W reads X and the gradient of Y unrounded.
 */
import { MlpRecipe } from "../../native/abi.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";
import type { E4m3Matrices } from "./e4m3.ts";
import { addWeightGradient, columnSum } from "./linear.ts";

/**
 * x_TI · weight_OIᵀ + bias_O → y_TO of x's type: bf16, with I and O multiples of 16, on a GPU, which has to be Hopper; f32 or bf16 on
 * processors.
 */
export function linearInE4m3(tape: Tape, x: Tensor, weight: Parameter, bias: Parameter | null = null): Tensor {
	const { device } = tape;
	const biasTrains = bias?.trainable ?? false;
	const wanted = x.gradient !== null || weight.trainable || biasTrains;
	const y = tape.output(Tensor.empty(device, [x.rows, weight.shape[0]!], x.dtype as FloatDtype), wanted);
	// The first forward of a recomputed layer does not record, but its second reads both orders of the weight: one pass makes both.
	const matrix = weight.inE4m3({ transposed: tape.recording || tape.training });
	using rows = contiguous(x);
	multiply(rows, matrix, matrix.values, y);
	if (bias) {
		const sizes = { rows: y.rows, groups: 1, width: y.width, dtype: y.dtypeCode };
		device.run("grouped_bias_forward", { bias: bias.value, factor: null, offsets: null, y, ...sizes });
	}
	tape.record({
		name: "linear_in_e4m3",
		outputs: [y],
		keep: [weight.trainable ? x : null],
		parameters: [weight, bias],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			if (x.gradient) {
				const dx = x.gradient.contiguousTarget();
				multiply(dy, matrix, matrix.transposed!, dx);
				x.gradient.accumulate(dx);
			}
			if (!weight.trainable && !biasTrains) return;
			tape.weightGradient(weight.trainable ? [x, dy] : [dy], () => {
				addWeightGradient(device, dy, x, weight);
				if (bias?.mainGradient) columnSum(device, dy, bias.mainGradient);
			});
		},
	});
	return y;
}

/** c = a bᵀ, a rounded here; b: the bytes of `matrix` in the order in which a's columns are summed. */
function multiply(a: Tensor, matrix: E4m3Matrices, b: Tensor, c: Tensor): void {
	a.device.run("grouped_gemm", {
		a,
		b,
		b_factors: matrix.factors,
		c,
		offsets: null,
		rows: a.rows,
		groups: 1,
		n: c.width,
		k: a.width,
		transpose_b: Number(b === matrix.values),
		recipe: MlpRecipe.e4m3Blockwise,
		a_dtype: a.dtypeCode,
		b_dtype: b.dtypeCode,
		c_dtype: c.dtypeCode,
	});
}
