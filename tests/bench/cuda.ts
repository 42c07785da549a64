/**
 * `bun tests/bench/bench.ts --device cuda`: operations of the CUDA library at the sizes of a 20-layer Nemotron model, each
 * against this GPU's own ceilings, measured in the same run: bf16 matrix products (8192 x 8192 x 8192) for those that
 * multiply, copies on the device (bytes read and written) for those that move memory: a copy of 1 GiB, and one that moves
 * as many bytes as the operation, which is what an operation that takes microseconds can reach. Bytes are the fewest an
 * operation can move: every input read once, every output written once. Times are of calls queued one after the other.
 */
import { Dtype, MlpRecipe } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { median } from "../../src/observe/series.ts";
import { E4m3Matrices, E4m3Rows } from "../../src/tensor/ops/e4m3.ts";
import { Tensor } from "../../src/tensor/tensor.ts";
import { adamwArguments } from "./adamw-arguments.ts";
import { attentionCases } from "./cuda-attention.ts";
import { type Case, hidden, Tensors, tokens } from "./cuda-case.ts";
import { expertCases } from "./cuda-experts.ts";
import { mambaCases } from "./cuda-mamba.ts";

export interface CudaRow {
	readonly operation: string;
	readonly shape: string;
	readonly milliseconds: number;
	/** Of the unit that bounds it: TFLOP/s or TB/s. */
	readonly rate: number;
	readonly unit: "TFLOP/s" | "TB/s";
	/** TB/s of a product that moves much memory too; null elsewhere. */
	readonly moves: number | null;
	/** Its rate over the ceiling's. */
	readonly ratio: number;
	/** Its rate over that of a copy that moves as many bytes (2 GiB at most); null where it multiplies. */
	readonly ofEqualCopy: number | null;
}

const rounds = 5;
const sampleSeconds = 0.05;
const f32 = Dtype.f32;
const bf16 = Dtype.bf16;

/** Median seconds of a call among many queued ones. */
function secondsOf(device: Device, run: () => void): number {
	const timed = (calls: number) => {
		const started = performance.now();
		for (let i = 0; i < calls; i++) run();
		device.synchronize();
		return (performance.now() - started) / 1000;
	};
	timed(2);
	const calls = Math.max(2, Math.ceil(sampleSeconds / (timed(3) / 3)));
	return median(Array.from({ length: rounds }, () => timed(calls) / calls));
}

function productCases(x: Tensors): Case[] {
	const { device } = x;
	const product = (m: number, n: number, k: number): Case => {
		const a = x.random([m, k]);
		const b = x.random([n, k]);
		const c = x.random([m, n]);
		const strides = { a_stride: k, b_stride: k, c_stride: n, a_batch_stride: 0, b_batch_stride: 0, c_batch_stride: 0 };
		const types = { a_dtype: bf16, b_dtype: bf16, c_dtype: bf16, transpose_a: 0, transpose_b: 1, beside_collective: 0 };
		const args = { a, b, c, bias: null, m, n, k, batch: 1, alpha: 1, beta: 0, ...strides, ...types };
		return {
			operation: "gemm",
			shape: `${m} x ${n} x ${k}`,
			work: 2 * m * n * k,
			unit: "TFLOP/s",
			run: () => device.run("gemm", args),
		};
	};
	return [
		product(8192, 8192, 8192),
		...projections.flatMap(([n, k]) => [product(tokens, n, k), productInE4m3(x, n, k)]),
		roundedRows(x, 4096),
	];
}

/** Outputs and inputs of Nemotron-3-Nano's projections. */
const projections = [
	[3712, hidden],
	[hidden, 3712],
	[hidden, 4096],
	[10304, hidden],
	[hidden, 10304],
] as const;

/** A projection whose operands are rounded to e4m3, its rows by the same call. */
function productInE4m3(x: Tensors, n: number, k: number): Case {
	const { device } = x;
	const [a, c] = [x.random([tokens, k]), x.random([tokens, n])];
	const b = x.own(new E4m3Matrices(x.random([n, k]), { transposed: false }));
	const sizes = { rows: tokens, groups: 1, n, k, transpose_b: 1 };
	const types = { recipe: MlpRecipe.e4m3Blockwise, a_dtype: bf16, b_dtype: Dtype.u8, c_dtype: bf16 };
	const args = { a, b: b.values, b_factors: b.factors, c, offsets: null, ...sizes, ...types };
	return {
		operation: "gemm in e4m3",
		shape: `${tokens} x ${n} x ${k}`,
		work: 2 * tokens * n * k,
		unit: "TFLOP/s",
		run: () => device.run("grouped_gemm", args),
	};
}

function roundedRows(x: Tensors, width: number): Case {
	const { device } = x;
	const rows = x.random([tokens, width]);
	const { values, factors } = x.own(new E4m3Rows(device, tokens, width));
	const row_count = x.integers(Int32Array.of(tokens));
	return {
		operation: "rounding to e4m3",
		shape: `${tokens} x ${width}`,
		work: 3 * tokens * width,
		unit: "TB/s",
		run: () => device.run("e4m3_rows", { x: rows, row_count, values, factors, rows: tokens, width, dtype: bf16 }),
	};
}

function normCases(x: Tensors): Case[] {
	const { device } = x;
	const [a, b, c, e] = [0, 1, 2, 3].map(() => x.random([tokens, hidden])) as [Tensor, Tensor, Tensor, Tensor];
	const weight = x.random([hidden]);
	const [rstd, dweight] = [x.random([tokens], "f32"), x.random([hidden], "f32")];
	const types = { dtype: bf16, weight_dtype: bf16, weight_offset: 0 };
	const size = { rows: tokens, width: hidden, group_size: hidden, x_stride: hidden, ...types };
	const bytes = 2 * tokens * hidden;
	const shape = `${tokens} x ${hidden}`;
	return [
		{
			operation: "RMSNorm",
			shape,
			work: 2 * bytes,
			unit: "TB/s",
			run: () =>
				device.run("rms_norm_forward", {
					...size,
					x: a,
					residual: null,
					weight,
					sum: null,
					y: e,
					rstd,
					y_stride: hidden,
					epsilon: 1e-5,
				}),
		},
		{
			operation: "RMSNorm after an addition",
			shape,
			work: 4 * bytes,
			unit: "TB/s",
			run: () =>
				device.run("rms_norm_forward", {
					...size,
					x: a,
					residual: b,
					weight,
					sum: c,
					y: e,
					rstd,
					y_stride: hidden,
					epsilon: 1e-5,
				}),
		},
		{
			operation: "RMSNorm backward",
			shape,
			work: 4 * bytes,
			unit: "TB/s",
			run: () =>
				device.run("rms_norm_backward", {
					...size,
					dy: a,
					x: b,
					weight,
					rstd,
					dresidual: c,
					dx: e,
					dweight,
					dy_stride: hidden,
					dx_stride: hidden,
				}),
		},
	];
}

/** The gated norm of the state space layers, and the vision tower's norm. */
function otherNormCases(x: Tensors): Case[] {
	const { device } = x;
	const types = { dtype: bf16, weight_dtype: bf16 };
	const [inner, groups] = [4096, 8];
	const [gated, y] = [x.random([tokens, inner]), x.random([tokens, inner])];
	const [weight, rstds] = [x.random([inner]), x.random([tokens, groups], "f32")];
	const [patches, width] = [16_384, 1280];
	const [a, b, c, e] = [0, 1, 2, 3].map(() => x.random([patches, width])) as [Tensor, Tensor, Tensor, Tensor];
	const [gain, bias] = [x.random([width]), x.random([width])];
	const [mean, rstd] = [x.random([patches], "f32"), x.random([patches], "f32")];
	const [dweight, dbias] = [x.random([width], "f32"), x.random([width], "f32")];
	const layer = { rows: patches, width, weight: gain, mean, rstd, x: a, ...types };
	const bytes = 2 * patches * width;
	return [
		{
			operation: "group RMSNorm",
			shape: `${tokens} x ${inner} in ${groups} groups`,
			work: 4 * tokens * inner,
			unit: "TB/s",
			run: () =>
				device.run("rms_norm_forward", {
					...types,
					x: gated,
					residual: null,
					weight,
					sum: null,
					y,
					rstd: rstds,
					rows: tokens,
					width: inner,
					group_size: inner / groups,
					weight_offset: 0,
					x_stride: inner,
					y_stride: inner,
					epsilon: 1e-5,
				}),
		},
		{
			operation: "LayerNorm",
			shape: `${patches} x ${width}`,
			work: 2 * bytes,
			unit: "TB/s",
			run: () => device.run("layer_norm_forward", { ...layer, residual: null, sum: null, bias, y: b, epsilon: 1e-6 }),
		},
		{
			operation: "LayerNorm after an addition",
			shape: `${patches} x ${width}`,
			work: 4 * bytes,
			unit: "TB/s",
			run: () => device.run("layer_norm_forward", { ...layer, residual: c, sum: e, bias, y: b, epsilon: 1e-6 }),
		},
		{
			operation: "LayerNorm backward",
			shape: `${patches} x ${width}`,
			work: 4 * bytes,
			unit: "TB/s",
			run: () => device.run("layer_norm_backward", { ...layer, dy: b, dresidual: c, dx: e, dweight, dbias }),
		},
	];
}

function lossCases(x: Tensors): Case[] {
	const { device } = x;
	const vocabulary = 131_072;
	const logits = x.random([tokens, vocabulary]);
	const labels = x.integers(Int32Array.from({ length: tokens }, (_, t) => (t * 7919) % vocabulary));
	const [maximum, sum, target, lse, loss] = [0, 1, 2, 3, 4].map(() => x.random([tokens], "f32")) as [
		Tensor,
		Tensor,
		Tensor,
		Tensor,
		Tensor,
	];
	const found = x.integers(new Int32Array(tokens));
	const shard = {
		tokens,
		vocabulary_start: 0,
		vocabulary_rows: vocabulary,
		vocabulary_live: vocabulary,
		dtype: bf16,
		labels,
		logits,
	};
	const shape = `${tokens} x ${vocabulary}`;
	return [
		{
			operation: "cross entropy",
			shape,
			work: 2 * tokens * vocabulary,
			unit: "TB/s",
			run: () =>
				device.run("cross_entropy_statistics", { ...shard, maximum, sum_exp: sum, target_logit: target, found }),
		},
		{
			operation: "cross entropy backward",
			shape,
			work: 4 * tokens * vocabulary,
			unit: "TB/s",
			run: () =>
				device.run("cross_entropy_backward", {
					...shard,
					lse,
					dloss: loss,
					dlogits: logits,
					z_loss: 0,
					round_bf16: 0,
				}),
		},
	];
}

function optimizerCases(x: Tensors): Case[] {
	const { device } = x;
	const elements = 2 ** 28;
	const [master, gradient, expAvg] = [0, 1, 2].map(() => x.random([elements], "f32", 0.01)) as [Tensor, Tensor, Tensor];
	const expAvgSq = x.random([elements], "f32", 0);
	const model = x.random([elements]);
	const scalar = (value: number) => {
		const made = x.random([1], "f32");
		device.copyToDevice(made, new Float32Array([value]));
		return made;
	};
	const adamw = adamwArguments({ master, model, gradient, expAvg, expAvgSq, foundInf: null }, scalar);
	const narrow = {
		exp_avg: x.random([elements], "bf16", 0.01),
		exp_avg_sq: x.random([elements], "bf16", 0),
		exp_avg_dtype: bf16,
		exp_avg_sq_dtype: bf16,
	};
	const sum = x.random([2], "f32");
	const shape = `${elements / 2 ** 20} Mi`;
	return [
		{
			operation: "AdamW",
			shape,
			work: 30 * elements,
			unit: "TB/s",
			run: () => device.run("adamw", adamw),
		},
		{
			operation: "AdamW, moments in bf16",
			shape,
			work: 22 * elements,
			unit: "TB/s",
			run: () => device.run("adamw", { ...adamw, ...narrow }),
		},
		{
			operation: "sum of squares",
			shape,
			work: 4 * elements,
			unit: "TB/s",
			run: () => device.run("sum_of_squares", { x: gradient, sum, elements, dtype: f32 }),
		},
	];
}

/** Measures everything on a CUDA device. */
export function benchCuda(device: Device): CudaRow[] {
	const bytes = 2 ** 30;
	using from = Tensor.zeros(device, [bytes / 4], "f32");
	using to = Tensor.zeros(device, [bytes / 4], "f32");
	const copy: Case = {
		operation: "copy",
		shape: "1 GiB",
		work: 2 * bytes,
		unit: "TB/s",
		run: () => device.copy(to, from, bytes),
	};
	const copyRates = new Map<number, number>();
	/** Of a copy that reads and writes so many bytes together. */
	const copyRate = (moved: number) => {
		const half = Math.min(bytes, Math.ceil(moved / 2));
		if (!copyRates.has(half)) {
			copyRates.set(half, (2 * half) / secondsOf(device, () => device.copy(to, from, half)) / 1e12);
		}
		return copyRates.get(half)!;
	};
	const ceilings: Record<string, number> = {};
	const rows: CudaRow[] = [];
	const add = ({ operation, shape, work, unit, bytes: moved, run }: Case) => {
		const seconds = secondsOf(device, run);
		const rate = work / seconds / 1e12;
		ceilings[unit] ??= rate;
		const ofEqualCopy = unit === "TB/s" ? rate / copyRate(work) : null;
		rows.push({
			operation,
			shape,
			milliseconds: seconds * 1000,
			rate,
			unit,
			moves: moved === undefined ? null : moved / seconds / 1e12,
			ratio: rate / ceilings[unit],
			ofEqualCopy,
		});
	};
	add(copy);
	for (const suite of [
		productCases,
		normCases,
		otherNormCases,
		expertCases,
		attentionCases,
		mambaCases,
		lossCases,
		optimizerCases,
	]) {
		using tensors = new Tensors(device);
		for (const one of suite(tensors)) add(one);
		device.trimMemory();
	}
	return rows;
}

/** The rows as text. */
export function cudaTable(rows: readonly CudaRow[]): string {
	const cells = rows.map(({ operation, shape, milliseconds, rate, unit, moves, ratio, ofEqualCopy }) => [
		operation,
		shape,
		milliseconds.toFixed(3),
		`${rate.toFixed(unit === "TB/s" ? 2 : 0)} ${unit}`,
		moves === null ? "" : `${moves.toFixed(2)} TB/s`,
		ratio.toFixed(2),
		ofEqualCopy === null ? "" : ofEqualCopy.toFixed(2),
	]);
	const all = [["operation", "shape", "ms", "rate", "and moves", "of the ceiling", "of an equal copy"], ...cells];
	const widths = all[0]!.map((_, column) => Math.max(...all.map((line) => line[column]!.length)));
	return all
		.map((line) =>
			line
				.map((cell, i) => (i >= 2 ? cell.padStart(widths[i]!) : cell.padEnd(widths[i]!)))
				.join("  ")
				.trimEnd(),
		)
		.join("\n");
}
