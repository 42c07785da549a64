/** Routing and experts at the sizes of a 20-layer Nemotron model. */
import { Dtype, MlpRecipe } from "../../src/native/abi.ts";
import type { Tensor } from "../../src/tensor/tensor.ts";
import { type Case, hidden, type Tensors, tokens } from "./cuda-case.ts";

const bf16 = Dtype.bf16;

/** The choice of `topk` of 128 experts for `count` tokens, and the sort of the chosen slots by expert. */
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
						logit_offsets: null,
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

const experts = 64;
const topk = 6;
/** Width of an expert's hidden layer. */
const width = 1856;
const rows = tokens * topk;

/** Products of each expert's rows with its weight, and their gradients. */
function productCases(x: Tensors, input: Tensor, output: Tensor): Case[] {
	const { device } = x;
	const offsets = x.integers(Int32Array.from({ length: experts + 1 }, (_, e) => (rows / experts) * e));
	const weight = x.random([experts, width, hidden], "bf16", 0.02);
	const gradient = x.random([experts, width, hidden], "f32");
	const shape = `${experts} x (${hidden} to ${width}), ${rows} rows`;
	const common = { offsets, rows, groups: experts };
	const types = { b_factors: null, recipe: MlpRecipe.plain, a_dtype: bf16, b_dtype: bf16, c_dtype: bf16 };
	const flops = { work: 2 * rows * hidden * width, unit: "TFLOP/s", shape } as const;
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
	];
}

/** The squared ReLU between the products, and its gradient. */
function activationCases(x: Tensors, output: Tensor): Case[] {
	const { device } = x;
	const probability = x.random([rows], "f32");
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
	const shape = `${rows} x ${width}`;
	return [
		{
			operation: "squared ReLU",
			shape,
			work: 4 * rows * width,
			unit: "TB/s",
			run: () => device.run("activation_forward", { ...activation, x: output, y: activated }),
		},
		{
			operation: "squared ReLU backward",
			shape,
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
	];
}

/** Tokens to the rows of their experts and back. */
function permutationCases(x: Tensors, input: Tensor): Case[] {
	const { device } = x;
	const order = x.integers(Int32Array.from({ length: rows }, (_, row) => (row * 7919) % rows));
	const tokenRows = x.random([tokens, hidden]);
	const routing = { tokens, topk, width: hidden, dtype: bf16 };
	const moved = 2 * (rows + tokens) * hidden;
	const shape = `${tokens} x ${topk} x ${hidden}`;
	return [
		{
			operation: "permute",
			shape,
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
			shape,
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

export function expertCases(x: Tensors): Case[] {
	const input = x.random([rows, hidden]);
	const output = x.random([rows, width]);
	return [
		...productCases(x, input, output),
		...activationCases(x, output),
		// A kernel's start takes most of the time at the model's size; with eight times the tokens, moving bytes does.
		...[tokens, 8 * tokens].flatMap((count) => routingCases(x, count, topk)),
		...permutationCases(x, input),
	];
}
