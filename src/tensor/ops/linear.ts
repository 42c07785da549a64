/** Y = X Wᵀ (+ b): the projection. Weights are [out, in]. */
import type { Device } from "../../native/device.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor.ts";

/** A matrix operand of gemm: `transposed` when stored the other way round. */
export interface Operand {
	readonly tensor: Tensor;
	readonly transposed: boolean;
}

/** c = alpha op(a) op(b) + beta c (+ bias): plain kernel call, nothing recorded. c_MN. */
export function gemm(
	device: Device,
	a: Operand,
	b: Operand,
	c: Tensor,
	options: { alpha?: number; beta?: number; bias?: Tensor | null; besideCollective?: boolean } = {},
): void {
	device.run("gemm", {
		a: a.tensor,
		b: b.tensor,
		c,
		bias: options.bias ?? null,
		m: c.rows,
		n: c.width,
		k: a.transposed ? a.tensor.rows : a.tensor.width,
		a_stride: a.tensor.stride,
		b_stride: b.tensor.stride,
		c_stride: c.stride,
		batch: 1,
		a_batch_stride: 0,
		b_batch_stride: 0,
		c_batch_stride: 0,
		alpha: options.alpha ?? 1,
		beta: options.beta ?? 0,
		transpose_a: Number(a.transposed),
		transpose_b: Number(b.transposed),
		a_dtype: a.tensor.dtypeCode,
		b_dtype: b.tensor.dtypeCode,
		c_dtype: c.dtypeCode,
		beside_collective: Number(options.besideCollective ?? false),
	});
}

export interface LinearOptions {
	/** x's unless given: a router's logits are f32 for bf16 operands. */
	readonly outputDtype?: FloatDtype;
	/**
	 * Starts the sum of x's gradient over ranks; meanwhile this weight's gradient, and those that wait to hide a sum, are computed. The
	 * gradient is contiguous.
	 */
	readonly sumInputGradient?: (dx: Tensor) => { wait(): void };
	/** Whether the weight's gradient waits, to hide the sum over ranks of an earlier operation's input gradient. */
	readonly weightGradientHides?: boolean;
	/** Whether the weight's gradient may be late; default true. False for the output layer, which would keep the logits' gradient. */
	readonly weightGradientLate?: boolean;
	/** Memory for the GELU of y (by tanh), which the same product writes: [T, O], contiguous, of y's type. It has no gradient. */
	readonly gelu?: Tensor | null;
	/** The tensor whose GELU x is, [T, I], contiguous: it gets the gradient in x's place, from the product that computes x's. */
	readonly geluOf?: Tensor | null;
}

/** x_TI · weight_OIᵀ + bias_O → y_TO. */
export function linear(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	bias: Parameter | null = null,
	options: LinearOptions = {},
): Tensor {
	const { device } = tape;
	const { outputDtype = x.dtype as FloatDtype, sumInputGradient } = options;
	const { weightGradientHides = false, weightGradientLate = true, gelu = null, geluOf = null } = options;
	const outputs = weight.shape[0]!;
	const source = geluOf ?? x;
	const wanted = source.gradient !== null || weight.trainable || (bias?.trainable ?? false);
	const y = tape.output(Tensor.empty(device, [x.rows, outputs], outputDtype), wanted);
	const w = weight.value;
	if (gelu) geluProduct(x, w, bias?.value ?? null, y, gelu);
	else
		gemm(device, { tensor: x, transposed: false }, { tensor: w, transposed: true }, y, { bias: bias?.value ?? null });
	tape.record({
		name: "linear",
		outputs: [y],
		// A frozen weight's gradient reads nothing.
		keep: [weight.trainable ? x : null, geluOf],
		parameters: [weight, bias],
		backward: ([gradient]) => {
			const dy = gradient!;
			const slot = source.gradient;
			const dx = sumInputGradient || geluOf ? slot?.contiguousTarget() : null;
			if (dx && geluOf) geluProductGradient(dy, w, geluOf, dx);
			else if (dx) gemm(device, { tensor: dy, transposed: false }, { tensor: w, transposed: false }, dx);
			else slot?.fuse((previous, into) => addInputGradient(device, dy, w, previous, into));
			const sum = dx && sumInputGradient?.(dx);
			if (sum) tape.drainBesideSum();
			const besideCollective = weightGradientHides || Boolean(sum);
			const weightGradient = () => {
				addWeightGradient(device, dy, x, weight, besideCollective);
				if (bias?.mainGradient) columnSum(device, dy, bias.mainGradient);
			};
			const trains = weight.trainable || (bias?.trainable ?? false);
			if (trains && !weightGradientLate) weightGradient();
			else if (trains) {
				const reads = weight.trainable ? [x, dy] : [dy];
				tape.weightGradient(reads, weightGradient, { hides: weightGradientHides });
			}
			sum?.wait();
			if (dx) slot!.accumulate(dx);
		},
	});
	return y;
}

/** z_TO = x_TI wᵀ_OI + bias and y_TO = GELU(z), all of one storage type. */
function geluProduct(x: Tensor, w: Tensor, bias: Tensor | null, z: Tensor, y: Tensor): void {
	const sizes = { rows: x.rows, inputs: x.width, outputs: w.rows, x_stride: x.stride };
	requireLike(z, y, w);
	x.device.run("gelu_gemm_forward", { x, w, bias, z, y, ...sizes, dtype: x.dtypeCode });
}

/** dz_TI = GELU'(z) (dy_TO w_OI). */
function geluProductGradient(dy: Tensor, w: Tensor, z: Tensor, dz: Tensor): void {
	const sizes = { rows: dy.rows, inputs: w.width, outputs: w.rows, dy_stride: dy.stride };
	requireLike(z, dz, w);
	dy.device.run("gelu_gemm_backward", { dy, w, z, dz, ...sizes, dtype: dy.dtypeCode });
}

function requireLike(a: Tensor, b: Tensor, w: Tensor): void {
	if (
		a.elements === b.elements &&
		a.width === b.width &&
		a.contiguous &&
		b.contiguous &&
		a.dtype === b.dtype &&
		a.dtype === w.dtype
	)
		return;
	throw new RangeError(
		`A GELU takes contiguous tensors of one kind, not ${a.dtype} [${a.shape}] and ${b.dtype} [${b.shape}].`,
	);
}

/** into_TI = previous_TI (null: 0) + dy_TO · weight_OI; `into` may be `previous`. */
function addInputGradient(device: Device, dy: Tensor, w: Tensor, previous: Tensor | null, into: Tensor): void {
	if (previous !== null && previous !== into) copyInto(previous, into);
	const options = { beta: previous === null ? 0 : 1 };
	gemm(device, { tensor: dy, transposed: false }, { tensor: w, transposed: false }, into, options);
}

/** dweight_OI += dy_TOᵀ · x_TI. */
export function addWeightGradient(
	device: Device,
	dy: Tensor,
	x: Tensor,
	weight: Parameter,
	besideCollective = false,
): void {
	weight.addToGradient((into, accumulate) => {
		const beta = Number(accumulate);
		gemm(device, { tensor: dy, transposed: true }, { tensor: x, transposed: false }, into, { beta, besideCollective });
	});
}

/** dbias_W += Σ_rows dy_RW. */
export function columnSum(device: Device, dy: Tensor, dbias: Tensor): void {
	device.run("column_sum", {
		dy,
		dbias,
		row_count: dy.rowCount,
		rows: dy.rows,
		width: dy.width,
		stride: dy.stride,
		dtype: dy.dtypeCode,
	});
}
