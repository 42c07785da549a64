/**
 * Entering and leaving tensor-parallel regions (Megatron's mappings). Between layers of the language model every rank
 * holds its own run of the microbatch's tokens (sequence parallelism); inside a layer all tokens and a part of the
 * channels. The encoder keeps all tokens on every rank.
 */
import { columnSum, type LinearOptions, linear } from "../tensor/ops/linear.ts";
import type { Parameter } from "../tensor/parameter.ts";
import type { Tape } from "../tensor/tape.ts";
import { copyInto, type FloatDtype, Tensor } from "../tensor/tensor.ts";
import type { Group } from "./group.ts";

/** x_(T/tp)H of every rank → x_TH. Backward: the sum of all ranks' gradients, own rows. */
export function gatherSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const y = tape.output(Tensor.empty(device, [x.rows * tp.size, x.width], x.dtype), x.gradient !== null);
	tp.allGather(x, y).wait();
	return recordMove(tape, "gather_sequence", x, y, (dy, dx) => tp.reduceScatter(dy, dx).wait());
}

/** Partial sums x_TH of every rank → their sum, own rows: y_(T/tp)H. Backward: all ranks' gradients, gathered. */
export function reduceScatterSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const y = tape.output(Tensor.empty(device, [x.rows / tp.size, x.width], x.dtype), x.gradient !== null);
	tp.reduceScatter(x, y).wait();
	return recordMove(tape, "reduce_scatter_sequence", x, y, (dy, dx) => tp.allGather(dy, dx).wait());
}

/** x_TH, the same on every rank → its own rows: y_(T/tp)H. Backward: all ranks' gradients, gathered. */
export function scatterSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const rows = x.rows / tp.size;
	using own = x.rowsFrom(tp.rank * rows, rows);
	const y = tape.output(own.withGradient(null), x.gradient !== null);
	return recordMove(tape, "scatter_sequence", x, y, (dy, dx) => tp.allGather(dy, dx).wait());
}

/** The same x on every rank enters a region where each uses it in part. Backward: the sum of all ranks' gradients. */
export function copyToTensorParallel(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1 || x.gradient === null) return x.share();
	const y = tape.output(x.withGradient(null), true);
	return recordMove(tape, "copy_to_tensor_parallel", x, y, (dy, dx) => {
		// Own memory: the gradient that came may be shared with another value.
		copyInto(dy, dx);
		tp.allReduce(dx).wait();
	});
}

/** Records y, made of x, on the tape; `back` writes the gradient of x into dx, contiguous and of x's shape. Returns y. */
function recordMove(tape: Tape, name: string, x: Tensor, y: Tensor, back: (dy: Tensor, dx: Tensor) => void): Tensor {
	tape.record({
		name,
		outputs: [y],
		backward: ([dy]) => {
			const dx = x.gradient!.contiguousTarget();
			back(dy!, dx);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/** Partial sums of every rank → their sum on every rank. Takes over x. Backward: the gradient as it is. */
function reduceFromTensorParallel(x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x;
	tp.allReduce(x).wait();
	return x;
}

/** x_T(C/tp) of every rank → x_TC on every rank. Backward: own columns, the gradient being the same everywhere. */
export function gatherColumns(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const width = x.width;
	const y = tape.output(Tensor.empty(device, [x.rows, width * tp.size], x.dtype as FloatDtype), x.gradient !== null);
	using parts = Tensor.empty(device, [tp.size * x.rows, width], x.dtype, "workspace");
	tp.allGather(x, parts).wait();
	for (let rank = 0; rank < tp.size; rank++) {
		using part = parts.rowsFrom(rank * x.rows, x.rows);
		using columns = y.columns(rank * width, width);
		copyInto(part, columns);
	}
	tape.record({
		name: "gather_columns",
		outputs: [y],
		backward: ([dy]) => {
			const dx = x.gradient!.target();
			using own = dy!.columns(tp.rank * width, width);
			copyInto(own, dx);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/**
 * x_TI, the same on every rank, · weight_(O/tp)Iᵀ + bias_(O/tp) → y_T(O/tp), own columns. Backward: the ranks' gradients
 * of x are added while each computes its weight's (Megatron's asynchronous all-reduce).
 */
export function columnParallelLinear(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	bias: Parameter | null,
	tp: Group,
	options: Pick<LinearOptions, "gelu"> = {},
): Tensor {
	const sum = tp.size === 1 ? {} : { sumInputGradient: (dx: Tensor) => tp.allReduce(dx) };
	return linear(tape, x, weight, bias, { ...options, ...sum });
}

/**
 * x_T(I/tp) · weight_O(I/tp)ᵀ summed over ranks + bias_O → y_TO on every rank. The first rank's product adds the bias;
 * every rank forms the bias's gradient, which is the same everywhere. Backward leaves the weight's gradient for the sum of
 * the column-parallel product before it, which it hides.
 */
export function rowParallelLinear(
	tape: Tape,
	x: Tensor,
	weight: Parameter,
	bias: Parameter | null,
	tp: Group,
	{ geluOf = null }: Pick<LinearOptions, "geluOf"> = {},
): Tensor {
	const options = { weightGradientHides: tp.size > 1, geluOf };
	if (bias === null || tp.rank === 0) return reduceFromTensorParallel(linear(tape, x, weight, bias, options), tp);
	const y = linear(tape, x, weight, null, options);
	tape.record({
		name: "replicated_bias",
		outputs: [y],
		parameters: [bias],
		backward: ([gradient]) => {
			const dy = gradient!;
			const biasGradient = () => columnSum(tape.device, dy, bias.mainGradient!);
			if (bias.trainable) tape.weightGradient([dy], biasGradient, { hides: true });
			// On to the product, which was recorded before.
			y.gradient!.accumulate(dy.share());
		},
	});
	return reduceFromTensorParallel(y, tp);
}
