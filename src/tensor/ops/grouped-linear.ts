/**
 * Y = X W_gᵀ for the rows of every expert g (docs/spec/moe-performance.md §1.1, §1.3). Weights are [experts, out, in].
 */
import { MlpRecipe, type MlpRecipeName } from "../../native/abi.ts";
import type { Device } from "../../native/device.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";
import type { E4m3Rows } from "./e4m3.ts";
import type { LinearOptions } from "./linear.ts";

/** c_R = a_R · weight_gᵀ where `transposed`, else a_R · weight_g, of the rows of every expert g. */
export function groupedGemm(
	device: Device,
	a: Tensor,
	weight: Tensor,
	transposed: boolean,
	offsets: Tensor,
	c: Tensor,
): void {
	device.run("grouped_gemm", {
		a,
		b: weight,
		b_factors: null,
		c,
		offsets,
		rows: a.rows,
		groups: weight.shape[0]!,
		n: c.width,
		k: a.width,
		transpose_b: Number(transposed),
		recipe: MlpRecipe.plain,
		a_dtype: a.dtypeCode,
		b_dtype: weight.dtypeCode,
		c_dtype: c.dtypeCode,
	});
}

/**
 * x_RI rows sorted by expert → y_RO of the same type: rows offsets[g] ≤ r < offsets[g + 1] times weight_gOI. `offsets`
 * is int32 [experts + 1]; rows from its last entry on are left alone. An expert without rows adds nothing to its weight
 * gradient.
 */
export function groupedLinear(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	offsets: Tensor,
	{ weightGradientHides = false }: Pick<LinearOptions, "weightGradientHides"> = {},
): Tensor {
	const { device } = tape;
	const [experts, outputs, inputs] = weight.shape as readonly [number, number, number];
	if (!x.contiguous || x.width !== inputs || offsets.elements !== experts + 1) {
		throw new RangeError(
			`${weight.name} of shape [${weight.shape}] cannot take rows of shape [${x.shape}] with ${offsets.elements} offsets.`,
		);
	}
	using all = tape.output(Tensor.empty(device, [x.rows, outputs], x.dtype), x.gradient !== null || weight.trainable);
	const y = all.withRowCount(x.rowCount);
	groupedGemm(device, x, weight.value, true, offsets, y);
	tape.record({
		name: "grouped_linear",
		outputs: [y],
		keep: [weight.trainable ? x : null, offsets, x.rowCount],
		parameters: [weight],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			if (x.gradient) {
				const dx = x.gradient.contiguousTarget();
				groupedGemm(device, dy, weight.value, false, offsets, dx);
				x.gradient.accumulate(dx);
			}
			if (!weight.trainable) return;
			tape.weightGradient([x, dy, offsets], () => addGroupedWeightGradient(device, dy, x, weight, offsets), {
				hides: weightGradientHides,
			});
		},
	});
	return y;
}

/** dweight_gOI += dy_ROᵀ · x_RI of the rows of every expert g, in `recipe` e4m3Blockwise rounded to e4m3 or given so. */
export function addGroupedWeightGradient(
	device: Device,
	dy: Tensor | E4m3Rows,
	x: Tensor | E4m3Rows,
	weight: Parameter,
	offsets: Tensor,
	recipe: MlpRecipeName = "plain",
): void {
	const [left, right] = [dy, x].map((rows) => (rows instanceof Tensor ? { values: rows, factors: null } : rows));
	weight.addToGradient((into, accumulate) =>
		device.run("grouped_gemm_weight_gradient", {
			dy: left!.values,
			dy_factors: left!.factors,
			x: right!.values,
			x_factors: right!.factors,
			dw: into,
			offsets,
			rows: right!.values.rows,
			groups: weight.shape[0]!,
			n: left!.values.width,
			k: right!.values.width,
			accumulate: Number(accumulate),
			recipe: MlpRecipe[recipe],
			dy_dtype: left!.values.dtypeCode,
			x_dtype: right!.values.dtypeCode,
		}),
	);
}
