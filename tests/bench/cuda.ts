/**
 * `bun tests/bench/bench.ts --device cuda`: operations of the CUDA library at the sizes of a 20-layer Nemotron model, each
 * against this GPU's own ceilings, measured in the same run: bf16 matrix products (8192 x 8192 x 8192) for those that
 * multiply, copies on the device (bytes read and written) for those that move memory. Bytes are the fewest an operation
 * can move: every input read once, every output written once. Times are of calls queued one after the other.
 */
import { Dtype } from "../../src/native/abi.ts";
import type { Device } from "../../src/native/device.ts";
import { type FloatDtype, Tensor } from "../../src/tensor/tensor.ts";
import { median } from "./measure.ts";

export interface CudaRow {
	readonly operation: string;
	readonly shape: string;
	readonly milliseconds: number;
	/** Of the unit that bounds it: TFLOP/s or TB/s. */
	readonly rate: number;
	readonly unit: "TFLOP/s" | "TB/s";
	/** Its rate over the ceiling's. */
	readonly ratio: number;
}

interface Case {
	readonly operation: string;
	readonly shape: string;
	/** Floating-point operations, or bytes moved. */
	readonly work: number;
	readonly unit: CudaRow["unit"];
	readonly run: () => void;
}

const tokens = 8192;
const hidden = 2688;
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

/** Random tensors of a suite, released with it. */
class Tensors {
	readonly #stack = new DisposableStack();
	#seed = 1;

	constructor(readonly device: Device) {}

	random(shape: readonly number[], dtype: FloatDtype = "bf16", scale = 1): Tensor {
		const tensor = this.#stack.use(Tensor.empty(this.device, shape, dtype));
		this.device.run("philox_fill", {
			y: tensor,
			rows: 1,
			width: tensor.elements,
			first_row: 0,
			first_column: 0,
			full_width: tensor.elements,
			seed: this.#seed++,
			a: 0,
			b: scale,
			distribution: 1,
			dtype: Dtype[dtype],
		});
		return tensor;
	}

	integers(values: Int32Array): Tensor {
		return this.#stack.use(Tensor.from(this.device, values));
	}

	[Symbol.dispose](): void {
		this.#stack.dispose();
	}
}

function productCases(x: Tensors): Case[] {
	const { device } = x;
	const product = (m: number, n: number, k: number): Case => {
		const a = x.random([m, k]);
		const b = x.random([n, k]);
		const c = x.random([m, n]);
		const strides = { a_stride: k, b_stride: k, c_stride: n, a_batch_stride: 0, b_batch_stride: 0, c_batch_stride: 0 };
		const types = { a_dtype: bf16, b_dtype: bf16, c_dtype: bf16, transpose_a: 0, transpose_b: 1 };
		const args = { a, b, c, bias: null, m, n, k, batch: 1, alpha: 1, beta: 0, ...strides, ...types };
		return {
			operation: "gemm",
			shape: `${m} x ${n} x ${k}`,
			work: 2 * m * n * k,
			unit: "TFLOP/s",
			run: () => device.run("gemm", args),
		};
	};
	return [product(8192, 8192, 8192), product(tokens, 3712, hidden), product(tokens, hidden, 4096)];
}

function expertCases(x: Tensors): Case[] {
	const { device } = x;
	const [experts, topk, width] = [64, 6, 1856];
	const rows = tokens * topk;
	const offsets = x.integers(Int32Array.from({ length: experts + 1 }, (_, e) => (rows / experts) * e));
	const input = x.random([rows, hidden]);
	const output = x.random([rows, width]);
	const weight = x.random([experts, width, hidden], "bf16", 0.02);
	const gradient = x.random([experts, width, hidden], "f32");
	const probability = x.random([rows], "f32");
	const shape = `${experts} x (${hidden} to ${width}), ${rows} rows`;
	const common = { offsets, rows, groups: experts };
	const types = { a_dtype: bf16, b_dtype: bf16, c_dtype: bf16 };
	const flops = { work: 2 * rows * hidden * width, unit: "TFLOP/s", shape } as const;
	const order = x.integers(Int32Array.from({ length: rows }, (_, row) => (row * 7919) % rows));
	const choice = x.integers(Int32Array.from({ length: rows }, (_, slot) => (slot * 11 + (slot % 13)) % 128));
	const counts = x.integers(new Int32Array(129));
	const [rowOf, slotOf] = [x.integers(new Int32Array(rows)), x.integers(new Int32Array(rows))];
	const tokenRows = x.random([tokens, hidden]);
	const activation = {
		row_probability: probability,
		row_count: null,
		rows,
		width,
		clamp: Number.POSITIVE_INFINITY,
		linear_offset: 0,
		kind: 0,
		dtype: bf16,
	};
	const activated = x.random([rows, width]);
	const routing = { tokens, topk, width: hidden, dtype: bf16 };
	const moved = 2 * (rows + tokens) * hidden;
	return [
		{
			...flops,
			operation: "grouped gemm",
			run: () =>
				device.run("grouped_gemm", {
					...common,
					...types,
					a: input,
					b: weight,
					c: output,
					n: width,
					k: hidden,
					transpose_b: 1,
				}),
		},
		{
			...flops,
			operation: "grouped gemm, input gradient",
			run: () =>
				device.run("grouped_gemm", {
					...common,
					...types,
					a: output,
					b: weight,
					c: input,
					n: hidden,
					k: width,
					transpose_b: 0,
				}),
		},
		{
			...flops,
			operation: "grouped gemm, weight gradient",
			run: () =>
				device.run("grouped_gemm_weight_gradient", {
					...common,
					dy: output,
					x: input,
					dw: gradient,
					n: width,
					k: hidden,
					dy_dtype: bf16,
					x_dtype: bf16,
				}),
		},
		{
			operation: "squared ReLU",
			shape: `${rows} x ${width}`,
			work: 4 * rows * width,
			unit: "TB/s",
			run: () => device.run("activation_forward", { ...activation, x: output, y: activated }),
		},
		{
			operation: "squared ReLU backward",
			shape: `${rows} x ${width}`,
			work: 6 * rows * width,
			unit: "TB/s",
			run: () =>
				device.run("activation_backward", {
					...activation,
					dy: activated,
					x: output,
					dx: output,
					drow_probability: probability,
				}),
		},
		{
			operation: "moe_sort",
			shape: `${tokens} x ${topk} of 128`,
			work: 3 * 4 * rows,
			unit: "TB/s",
			run: () =>
				device.run("moe_sort", {
					expert_index: choice,
					offsets: counts,
					row_of_slot: rowOf,
					slot_of_row: slotOf,
					tokens,
					topk,
					experts: 128,
				}),
		},
		{
			operation: "permute",
			shape: `${tokens} x ${topk} x ${hidden}`,
			work: moved,
			unit: "TB/s",
			run: () =>
				device.run("moe_permute", {
					...routing,
					x: tokenRows,
					probabilities: null,
					slot_of_row: order,
					row_count: null,
					rows: input,
					row_probability: null,
				}),
		},
		{
			operation: "unpermute",
			shape: `${tokens} x ${topk} x ${hidden}`,
			work: moved,
			unit: "TB/s",
			run: () =>
				device.run("moe_unpermute", {
					...routing,
					rows: input,
					row_probability: null,
					row_of_slot: order,
					y: tokenRows,
					probabilities: null,
				}),
		},
	];
}

function attentionCases(x: Tensors): Case[] {
	const { device } = x;
	return [
		{ queries: 32, keys: 8, size: 128, length: 8192, causal: true },
		{ queries: 16, keys: 16, size: 80, length: 16384, causal: false },
	].flatMap(({ queries, keys, size, length, causal }) => {
		const groupStride = (queries / keys + 2) * size;
		const stride = keys * groupStride;
		const width = queries * size;
		const qkv = x.random([length, stride]);
		const dqkv = x.random([length, stride]);
		const [o, dO] = [x.random([length, width]), x.random([length, width])];
		const lse = x.random([length, queries], "f32");
		const part = (tensor: Tensor, column: number) => ({
			allocation: tensor.allocation,
			byteOffset: tensor.byteOffset + 2 * column,
		});
		const [k, v] = [(queries / keys) * size, (queries / keys + 1) * size];
		const common = {
			q: qkv,
			k: part(qkv, k),
			v: part(qkv, v),
			lse,
			cu_seqlens: x.integers(Int32Array.of(0, length)),
			sequences: 1,
			tokens: length,
			max_seqlen: length,
			query_heads: queries,
			key_heads: keys,
			head_dim: size,
			token_stride: stride,
			group_stride: groupStride,
			dropout_seed: 0,
			first_token: 0,
			first_head: 0,
			full_heads: queries,
			softmax_scale: 1 / Math.sqrt(size),
			dropout: 0,
			mask: causal ? 1 : 0,
			dtype: bf16,
		};
		const flops = (4 * queries * size * length * length) / (causal ? 2 : 1);
		const shape = `${length}, ${queries}/${keys} heads of ${size}${causal ? ", causal" : ""}`;
		return [
			{
				operation: "attention",
				shape,
				work: flops,
				unit: "TFLOP/s",
				run: () => device.run("attention_forward", { ...common, o }),
			},
			{
				operation: "attention backward",
				shape,
				work: 2.5 * flops,
				unit: "TFLOP/s",
				run: () =>
					device.run("attention_backward", {
						...common,
						d_o: dO,
						o,
						dq: dqkv,
						dk: part(dqkv, k),
						dv: part(dqkv, v),
						d_o_stride: width,
						d_token_stride: stride,
					}),
			},
		] satisfies Case[];
	});
}

function mambaCases(x: Tensors): Case[] {
	const { device } = x;
	const [heads, headDim, groups, stateDim, channels] = [64, 64, 8, 128, 6144];
	const inner = heads * headDim;
	const [xbc, dxbc] = [x.random([tokens, channels]), x.random([tokens, channels])];
	const [z, o, y, dz] = [0, 1, 2, 3].map(() => x.random([tokens, inner])) as [Tensor, Tensor, Tensor, Tensor];
	const [dt, ddt] = [x.random([tokens, heads]), x.random([tokens, heads])];
	const [bias, aLog, d] = [0, 1, 2].map(() => x.random([heads], "f32", 0.1)) as [Tensor, Tensor, Tensor];
	const cu = x.integers(Int32Array.of(0, tokens));
	const part = (tensor: Tensor, column: number) => ({
		allocation: tensor.allocation,
		byteOffset: tensor.byteOffset + 2 * column,
	});
	const scan = {
		x: xbc,
		b: part(xbc, inner),
		c: part(xbc, inner + groups * stateDim),
		z,
		dt,
		dt_bias: bias,
		a_log: aLog,
		d,
		y,
		cu_seqlens: cu,
		sequences: 1,
		tokens,
		heads,
		head_dim: headDim,
		groups,
		state_dim: stateDim,
		chunk_size: 128,
		xbc_stride: channels,
		z_stride: inner,
		dt_stride: heads,
		dt_minimum: 0,
		dtype: bf16,
	};
	const [weight, cbias] = [x.random([channels, 4]), x.random([channels])];
	const [dweight, dbias] = [x.random([channels, 4], "f32"), x.random([channels], "f32")];
	const conv = {
		x: xbc,
		weight,
		bias: cbias,
		cu_seqlens: cu,
		sequences: 1,
		tokens,
		channels,
		width: 4,
		x_stride: channels,
		dtype: bf16,
		weight_dtype: bf16,
	};
	const shape = `${tokens}, ${heads} heads of ${headDim}, state ${stateDim}, ${groups} groups`;
	return [
		{
			operation: "conv1d and SiLU",
			shape: `${tokens} x ${channels}`,
			work: 4 * tokens * channels,
			unit: "TB/s",
			run: () => device.run("causal_conv1d_forward", { ...conv, y: dxbc, y_stride: channels }),
		},
		{
			operation: "conv1d and SiLU backward",
			shape: `${tokens} x ${channels}`,
			work: 6 * tokens * channels,
			unit: "TB/s",
			run: () =>
				device.run("causal_conv1d_backward", {
					...conv,
					dy: dxbc,
					dx: dxbc,
					dweight,
					dbias,
					dy_stride: channels,
					dx_stride: channels,
				}),
		},
		{
			operation: "SSD scan",
			shape,
			work: 2 * tokens * (channels + 3 * inner),
			unit: "TB/s",
			run: () => device.run("ssd_forward", { ...scan, o }),
		},
		{
			operation: "SSD scan backward",
			shape,
			work: 2 * tokens * (2 * channels + 4 * inner),
			unit: "TB/s",
			run: () =>
				device.run("ssd_backward", {
					...scan,
					d_o: o,
					dx: dxbc,
					db: part(dxbc, inner),
					dc: part(dxbc, inner + groups * stateDim),
					dz,
					ddt,
					ddt_bias: bias,
					da_log: aLog,
					dd: d,
					dxbc_stride: channels,
					dz_stride: inner,
					ddt_stride: heads,
				}),
		},
	];
}

function normCases(x: Tensors): Case[] {
	const { device } = x;
	const [a, b, c, e] = [0, 1, 2, 3].map(() => x.random([tokens, hidden])) as [Tensor, Tensor, Tensor, Tensor];
	const weight = x.random([hidden]);
	const [rstd, dweight] = [x.random([tokens], "f32"), x.random([hidden], "f32")];
	const size = { rows: tokens, width: hidden, group_size: hidden, x_stride: hidden, dtype: bf16, weight_dtype: bf16 };
	const bytes = 2 * tokens * hidden;
	const shape = `${tokens} x ${hidden}`;
	return [
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
	const adamw = {
		master,
		model,
		gradient,
		exp_avg: expAvg,
		exp_avg_sq: expAvgSq,
		learning_rate: scalar(1e-4),
		weight_decay: scalar(0.1),
		clip_factor: scalar(0.5),
		bias_correction1: scalar(0.5),
		bias_correction2: scalar(0.5),
		found_inf: null,
		elements,
		beta1: 0.9,
		beta2: 0.95,
		epsilon: 1e-8,
		weight_decay_multiplier: 1,
		learning_rate_multiplier: 1,
		model_dtype: bf16,
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
	const ceilings: Record<string, number> = {};
	const rows: CudaRow[] = [];
	const add = ({ operation, shape, work, unit, run }: Case) => {
		const seconds = secondsOf(device, run);
		const rate = work / seconds / 1e12;
		ceilings[unit] ??= rate;
		rows.push({ operation, shape, milliseconds: seconds * 1000, rate, unit, ratio: rate / ceilings[unit] });
	};
	add(copy);
	for (const suite of [productCases, normCases, expertCases, attentionCases, mambaCases, lossCases, optimizerCases]) {
		using tensors = new Tensors(device);
		for (const one of suite(tensors)) add(one);
		device.trimMemory();
	}
	return rows;
}

/** The rows as text. */
export function cudaTable(rows: readonly CudaRow[]): string {
	const cells = rows.map(({ operation, shape, milliseconds, rate, unit, ratio }) => [
		operation,
		shape,
		milliseconds.toFixed(3),
		`${rate.toFixed(unit === "TB/s" ? 2 : 0)} ${unit}`,
		ratio.toFixed(2),
	]);
	const all = [["operation", "shape", "ms", "rate", "of the ceiling"], ...cells];
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
