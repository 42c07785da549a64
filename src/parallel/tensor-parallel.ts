/**
 * Megatron's mappings: entering and leaving tensor-parallel regions. Between layers of the language model each rank holds its own
 * run of the tokens (sequence parallelism); inside a layer it holds all tokens and a part of the channels. In the encoder every
 * rank holds all tokens throughout.
 */
import {
	CrossEntropyStatistics,
	columnSum,
	copyInto,
	type FloatDtype,
	type LinearOptions,
	linear,
	type Parameter,
	type Tape,
	Tensor,
} from "../tensor/index.ts";
import type { Group } from "./group.ts";

/** All-gather: x_(T/tp)H of each rank → x_TH. Backward: reduce-scatter. */
export function gatherSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const y = tape.output(Tensor.empty(device, [x.rows * tp.size, x.width], x.dtype), x.gradient !== null);
	tp.allGather(x, y).wait();
	return recordMove(tape, "gather_sequence", x, y, (dy, dx) => tp.reduceScatter(dy, dx).wait());
}

/** Reduce-scatter: partial sums x_TH of each rank → y_(T/tp)H. Backward: all-gather. */
export function reduceScatterSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const y = tape.output(Tensor.empty(device, [x.rows / tp.size, x.width], x.dtype), x.gradient !== null);
	tp.reduceScatter(x, y).wait();
	return recordMove(tape, "reduce_scatter_sequence", x, y, (dy, dx) => tp.allGather(dy, dx).wait());
}

/** Scatter: x_TH, equal on each rank → its own rows y_(T/tp)H. Backward: all-gather. */
export function scatterSequence(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const rows = x.rows / tp.size;
	using own = x.rowsFrom(tp.rank * rows, rows);
	const y = tape.output(own.withGradient(null), x.gradient !== null);
	return recordMove(tape, "scatter_sequence", x, y, (dy, dx) => tp.allGather(dy, dx).wait());
}

/** Copy: x, equal on each rank, enters a region in which each rank uses it in part. Backward: all-reduce. */
export function copyToTensorParallel(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1 || x.gradient === null) return x.share();
	const y = tape.output(x.withGradient(null), true);
	return recordMove(tape, "copy_to_tensor_parallel", x, y, (dy, dx) => {
		// A copy: the incoming gradient may be shared with another value, and is reduced in place.
		copyInto(dy, dx);
		tp.allReduce(dx).wait();
	});
}

/** Records y as a function of x. `back` writes x's gradient into dx, contiguous and of x's shape. Returns y. */
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

/** All-reduce of partial sums, in place; takes over x. Backward: the gradient unchanged. */
export function reduceFromTensorParallel(x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x;
	tp.allReduce(x).wait();
	return x;
}

/** All-gather of columns: x_T(C/tp) of each rank → x_TC. Backward: own columns of the gradient, which is equal on all ranks. */
export function gatherColumns(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const { device } = tape;
	const width = x.width;
	const y = tape.output(Tensor.empty(device, [x.rows, width * tp.size], x.dtype as FloatDtype), x.gradient !== null);
	joinRanks(x, y, tp);
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

/** Own columns: x_TC, equal on each rank → y_T(C/tp). Backward: all-gather of columns. */
export function scatterColumns(tape: Tape, x: Tensor, tp: Group): Tensor {
	if (tp.size === 1) return x.share();
	const width = x.width / tp.size;
	const y = tape.output(Tensor.empty(tape.device, [x.rows, width], x.dtype as FloatDtype), x.gradient !== null);
	using own = x.columns(tp.rank * width, width);
	copyInto(own, y);
	return recordMove(tape, "scatter_columns", x, y, (dy, dx) => joinRanks(dy, dx, tp));
}

/** Writes the columns of all ranks side by side: part_T(C/tp) of each → whole_TC. */
function joinRanks(part: Tensor, whole: Tensor, tp: Group): void {
	using parts = Tensor.empty(part.device, [tp.size * part.rows, part.width], part.dtype, "workspace");
	tp.allGather(part, parts).wait();
	for (let rank = 0; rank < tp.size; rank++) {
		using rows = parts.rowsFrom(rank * part.rows, part.rows);
		using columns = whole.columns(rank * part.width, part.width);
		copyInto(rows, columns);
	}
}

/**
 * Column-parallel linear: x_TI, equal on each rank, · weight_(O/tp)Iᵀ + bias_(O/tp) → y_T(O/tp), own columns. Backward overlaps
 * the all-reduce of x's gradient with the weight gradient, as Megatron's asynchronous all-reduce does.
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
 * Row-parallel linear: Σ over ranks of x_T(I/tp) · weight_O(I/tp)ᵀ, + bias_O → y_TO on each rank. The first rank's product adds
 * the bias; each rank computes the bias's gradient, which is equal on all. The weight gradient is computed during the all-reduce
 * of the column-parallel linear before it, which it hides.
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
			// Passes the gradient on to the product, which was recorded before.
			y.gradient!.accumulate(dy.share());
		},
	});
	return reduceFromTensorParallel(y, tp);
}

// Cross-entropy over a vocabulary that is sharded over a tensor-parallel group.

/** All-gathers the shards' statistics: [1, T] of each rank → [tp, T]. */
export function gatherStatistics(own: CrossEntropyStatistics, tp: Group): CrossEntropyStatistics {
	const gather = (part: Tensor) => {
		const all = Tensor.empty(part.device, [tp.size, part.width], part.dtype as FloatDtype);
		return { all, pending: tp.allGather(part, all) };
	};
	const parts = [own.maximum, own.sumExp, own.targetLogit, own.found].map(gather);
	for (const { pending } of parts) pending.wait();
	const [maximum, sumExp, targetLogit, found] = parts.map(({ all }) => all) as [Tensor, Tensor, Tensor, Tensor];
	return new CrossEntropyStatistics(maximum, sumExp, targetLogit, found);
}
