/** Operations that mostly move memory, against a memcpy that reads and writes as many bytes in all. */
import { Activation } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { randomValues } from "../support.ts";
import { adamwArguments } from "./adamw-arguments.ts";
import { compare, type Row, row, timed } from "./measure.ts";

const group = "Memory-bound operations against memcpy of the same bytes";

interface Case {
	readonly operation: string;
	readonly shape: string;
	/** Read and written in all. */
	readonly bytes: number;
	readonly target: number | null;
	readonly run: () => void;
}

/** Tensors of one shape, filled; the caller disposes the stack. */
function tensors(device: Device, stack: DisposableStack, shape: readonly number[], count: number): Tensor[] {
	const elements = shape.reduce((product, size) => product * size, 1);
	// A short run of numbers repeated: their values do not matter, though denormal numbers and NaN would.
	const values = new Float32Array(elements);
	const some = randomValues(4099, 5);
	for (let i = 0; i < elements; i++) values[i] = some[i % some.length]!;
	return Array.from({ length: count }, () => stack.use(Tensor.from(device, values, shape)));
}

function rowCases(device: Device, stack: DisposableStack, rows: number, width: number): Case[] {
	const [x, residual, y, sum, dy, dx] = tensors(device, stack, [rows, width], 6) as [
		Tensor,
		Tensor,
		Tensor,
		Tensor,
		Tensor,
		Tensor,
	];
	const [weight, bias] = tensors(device, stack, [width], 2) as [Tensor, Tensor];
	const dweight = stack.use(Tensor.zeros(device, [width]));
	const dbias = stack.use(Tensor.zeros(device, [width]));
	const [rstd, mean] = tensors(device, stack, [rows], 2) as [Tensor, Tensor];
	const types = { dtype: x.dtypeCode, weight_dtype: x.dtypeCode };
	const strides = { x_stride: width, y_stride: width, dy_stride: width, dx_stride: width };
	const size = { rows, width };
	const rms = { ...size, ...types, weight, rstd, group_size: width, x_stride: width, weight_offset: 0 };
	const activation = {
		...size,
		row_probability: null,
		row_count: null,
		interleave: 0,
		clamp: Number.POSITIVE_INFINITY,
		linear_offset: 0,
		kind: Activation.squaredRelu,
		dtype: x.dtypeCode,
	};
	const rmsForward = (h: Tensor, added: Tensor | null) =>
		device.run("rms_norm_forward", {
			...rms,
			x: h,
			residual: added,
			sum: added ? sum : null,
			y,
			y_stride: width,
			epsilon: 1e-5,
		});
	const rmsBackward = () =>
		device.run("rms_norm_backward", {
			...rms,
			dy,
			x,
			dresidual: residual,
			dx,
			dweight,
			dy_stride: strides.dy_stride,
			dx_stride: strides.dx_stride,
		});
	const layerForward = (added: Tensor | null) => {
		const addends = { x, residual: added, sum: added ? sum : null };
		device.run("layer_norm_forward", { ...size, ...types, ...addends, weight, bias, y, mean, rstd, epsilon: 1e-5 });
	};
	const layerBackward = () =>
		device.run("layer_norm_backward", {
			...size,
			...types,
			dy,
			x,
			weight,
			mean,
			rstd,
			dresidual: residual,
			dx,
			dweight,
			dbias,
		});
	const add = () => device.run("add", { a: x, b: residual, y, elements: x.elements, dtype: x.dtypeCode });
	const activate = () => device.run("activation_forward", { ...activation, x, y });
	const activateBackward = () =>
		device.run("activation_backward", { ...activation, dy, x, dx, drow_probability: null });
	const cases: readonly (readonly [string, number, number | null, () => void])[] = [
		["RMSNorm", 2, 0.7, () => rmsForward(x, null)],
		["RMSNorm after an addition", 4, 0.7, () => rmsForward(x, residual)],
		["RMSNorm backward", 4, 0.7, rmsBackward],
		["LayerNorm", 2, 0.7, () => layerForward(null)],
		["LayerNorm after an addition", 4, 0.7, () => layerForward(residual)],
		["LayerNorm backward", 4, 0.7, layerBackward],
		["add", 3, null, add],
		["squared ReLU", 2, null, activate],
		["squared ReLU backward", 3, null, activateBackward],
	];
	return cases.map(([operation, passes, target, run]) => ({
		operation,
		shape: `${rows} x ${width}`,
		bytes: passes * x.bytes,
		target,
		run,
	}));
}

function optimizerCases(device: Device, stack: DisposableStack, elements: number): Case[] {
	const [master, gradient, expAvg] = tensors(device, stack, [elements], 3) as [Tensor, Tensor, Tensor];
	const expAvgSq = stack.use(Tensor.zeros(device, [elements]));
	const scalar = (value: number) => stack.use(Tensor.from(device, new Float32Array([value])));
	const total = stack.use(Tensor.zeros(device, [1], "f64"));
	const state = { master, model: null, gradient, expAvg, expAvgSq, foundInf: scalar(0) };
	const args = adamwArguments(state, scalar);
	const shape = `${elements}`;
	const sumOfSquares = () =>
		device.run("sum_of_squares", { x: gradient, sum: total, elements, dtype: gradient.dtypeCode });
	return [
		{ operation: "AdamW", shape, bytes: 7 * master.bytes, target: 0.7, run: () => device.run("adamw", args) },
		{ operation: "sum of squares", shape, bytes: master.bytes, target: null, run: sumOfSquares },
	];
}

export async function benchStreams(device: Device): Promise<Row[]> {
	const { threads } = device.describe();
	const rows: Row[] = [];
	for (const make of [
		// Both larger than caches: a copy that stays in one measures no memory.
		(stack: DisposableStack) => rowCases(device, stack, 16384, 1024),
		(stack: DisposableStack) => rowCases(device, stack, 4096, 2688),
		(stack: DisposableStack) => optimizerCases(device, stack, 1 << 20),
		(stack: DisposableStack) => optimizerCases(device, stack, 1 << 24),
	]) {
		using stack = new DisposableStack();
		for (const { operation, shape, bytes, target, run } of make(stack)) {
			using from = Tensor.zeros(device, [bytes / 2], "u8");
			using to = Tensor.zeros(device, [bytes / 2], "u8");
			const seconds = await compare(
				timed(run),
				timed(() => device.copy(to, from, bytes / 2)),
			);
			rows.push(row({ group, operation, shape, threads, baseline: "memcpy", target }, seconds));
		}
		device.trimMemory();
	}
	return rows;
}
