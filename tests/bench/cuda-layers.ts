/** Operations of the layers, at the sizes of a 20-layer Nemotron model and its vision tower. */
import { Dtype, MlpRecipe } from "../../src/native/abi.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";
import { type Case, hidden, type Tensors, tokens } from "./cuda-case.ts";

const bf16 = Dtype.bf16;

/** The choice of `topk` of 128 experts for `count` tokens, and the order of what they chose. */
function routingCases(x: Tensors, count: number, topk: number): Case[] {
	const { device } = x;
	const [experts, rows] = [128, count * topk];
	const scores = { logits: x.random([count, experts], "f32"), scores: x.random([count, experts], "f32") };
	const routed = { probabilities: x.random([count, topk], "f32"), expert_index: x.integers(new Int32Array(rows)) };
	const choice = x.integers(Int32Array.from({ length: rows }, (_, slot) => (slot * 11 + (slot % 13)) % experts));
	const offsets = x.integers(new Int32Array(experts + 1));
	const [rowOf, slotOf] = [x.integers(new Int32Array(rows)), x.integers(new Int32Array(rows))];
	return [
		...[null, x.random([experts], "f32")].map(
			(bias): Case => ({
				operation: bias === null ? "router" : "router with biases",
				shape: `${count} x ${experts}, ${topk} of them`,
				work: 8 * count * (experts + topk),
				unit: "TB/s",
				run: () =>
					device.run("router_forward", {
						...scores,
						...routed,
						expert_bias: bias,
						padding_mask: null,
						cu_seqlens: null,
						tokens_per_expert: null,
						sequence_counts: null,
						sequence_score_sums: null,
						sequence_tokens: null,
						sequences: 0,
						tokens: count,
						experts,
						topk,
						expert_groups: 1,
						group_topk: 1,
						group_score_topk: 1,
						scaling_factor: 2.5,
						score_function: 0,
						pre_softmax: 0,
					}),
			}),
		),
		{
			operation: "moe_sort",
			shape: `${count} x ${topk} of ${experts}`,
			work: 3 * 4 * rows,
			unit: "TB/s",
			run: () =>
				device.run("moe_sort", {
					expert_index: choice,
					offsets,
					row_of_slot: rowOf,
					slot_of_row: slotOf,
					tokens: count,
					topk,
					experts,
				}),
		},
	];
}

export function expertCases(x: Tensors): Case[] {
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
	const tokenRows = x.random([tokens, hidden]);
	const activation = {
		row_probability: probability,
		row_count: null,
		rows,
		width,
		interleave: 0,
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
		...[1, 0].map(
			(accumulate): Case => ({
				...flops,
				bytes: 2 * rows * (width + hidden) + 4 * (1 + accumulate) * gradient.elements,
				operation: `grouped gemm, weight gradient ${accumulate ? "added to" : "written in"} fp32`,
				run: () =>
					device.run("grouped_gemm_weight_gradient", {
						...common,
						dy: output,
						x: input,
						dy_factors: null,
						x_factors: null,
						dw: gradient,
						n: width,
						k: hidden,
						accumulate,
						recipe: MlpRecipe.plain,
						dy_dtype: bf16,
						x_dtype: bf16,
					}),
			}),
		),
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
		// At the model's size microseconds pass in starting; with eight times the tokens bytes do.
		...[tokens, 8 * tokens].flatMap((count) => routingCases(x, count, topk)),
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
					e4m3: null,
					e4m3_factors: null,
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

export interface Heads {
	/** Of packed sequences. */
	readonly lengths: readonly number[];
	readonly queries: number;
	readonly keys: number;
	readonly size: number;
	readonly causal: boolean;
}

/** Floating-point operations of attention; its gradient has 2.5 times as many. */
export function attentionWork({ lengths, queries, size, causal }: Heads): number {
	const squares = lengths.reduce((sum, length) => sum + length * length, 0);
	return (4 * queries * size * squares) / (causal ? 2 : 1);
}

/** Attention of a fused projection, and its gradient; what each writes. */
export function attentionCalls(x: Tensors, { lengths, queries, keys, size, causal }: Heads) {
	const { device } = x;
	const tokens = lengths.reduce((a, b) => a + b, 0);
	const groupStride = (queries / keys + 2) * size;
	const stride = keys * groupStride;
	const width = queries * size;
	const qkv = x.random([tokens, stride]);
	const dqkv = x.random([tokens, stride]);
	const [o, dO] = [x.random([tokens, width]), x.random([tokens, width])];
	const lse = x.random([tokens, queries], "f32");
	const part = (tensor: Tensor, column: number) => ({
		allocation: tensor.allocation,
		byteOffset: tensor.byteOffset + 2 * column,
	});
	const [k, v] = [(queries / keys) * size, (queries / keys + 1) * size];
	const ends = lengths.map((_, sequence) => lengths.slice(0, sequence + 1).reduce((a, b) => a + b, 0));
	const common = {
		q: qkv,
		k: part(qkv, k),
		v: part(qkv, v),
		lse,
		cu_seqlens: x.integers(Int32Array.of(0, ...ends)),
		sequences: lengths.length,
		tokens,
		max_seqlen: Math.max(...lengths),
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
	const backward = {
		...common,
		d_o: dO,
		o,
		dq: dqkv,
		dk: part(dqkv, k),
		dv: part(dqkv, v),
		d_o_stride: width,
		d_token_stride: stride,
	};
	return {
		forward: { run: () => device.run("attention_forward", { ...common, o }), result: o },
		backward: { run: () => device.run("attention_backward", backward), result: dqkv },
	};
}

export function attentionCases(x: Tensors): Case[] {
	const images = { queries: 16, keys: 16, size: 80, causal: false };
	return [
		{ queries: 32, keys: 8, size: 128, causal: true, count: 1, length: 8192 },
		{ ...images, queries: 8, keys: 8, count: 1, length: 16384 },
		{ ...images, count: 1, length: 16384 },
		{ ...images, count: 4, length: 4096 },
		{ ...images, count: 16, length: 1024 },
		{ ...images, count: 64, length: 256 },
	].flatMap(({ count, length, ...heads }) => {
		const { queries, keys, size, causal } = heads;
		const whole = { ...heads, lengths: new Array<number>(count).fill(length) };
		const { forward, backward } = attentionCalls(x, whole);
		const work = attentionWork(whole);
		const shape = `${count} x ${length}, ${queries}/${keys} heads of ${size}${causal ? ", causal" : ""}`;
		return [
			{ operation: "attention", shape, work, unit: "TFLOP/s", run: forward.run },
			{ operation: "attention backward", shape, work: 2.5 * work, unit: "TFLOP/s", run: backward.run },
		] satisfies Case[];
	});
}

export function mambaCases(x: Tensors): Case[] {
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
		z_factors: null,
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
	const dxconv = x.random([tokens, channels]);
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
					dx: dxconv,
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
			run: () => device.run("ssd_forward", { ...scan, o, final_state: null }),
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
					dz_factors: null,
					dxbc_stride: channels,
					dz_stride: inner,
					ddt_stride: heads,
				}),
		},
	];
}
