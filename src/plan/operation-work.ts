/**
 * Cost of an operation by its arguments: floating-point operations (a multiply-add counts 2) and bytes moved. Time
 * follows the first where it is a product, the second elsewhere.
 */
import { Dtype, MlpRecipe, type OperationName } from "../native/abi.ts";
import { isGatedCode } from "../native/activations.ts";
import type { OperationValues } from "../native/counting-library.ts";

export interface Work {
	readonly flops: number;
	readonly bytes: number;
}

/**
 * Products in e4m3 whose kernels depend on their rows: rows that are rounded already and lie beside those in bf16 ("e4m3"), that the
 * layer rounds, because an exchange has written them ("e4m3 rounding"), or that are in e4m3 alone. Weight gradients round or read them.
 */
const roundedNames = [
	"grouped_mlp_forward e4m3",
	"grouped_mlp_forward e4m3 rounding",
	"grouped_mlp_forward e4m3 alone",
	"grouped_mlp_backward e4m3",
	"grouped_mlp_backward e4m3 rounding",
	"grouped_mlp_backward e4m3 alone",
	"grouped_gemm e4m3",
	"grouped_gemm_weight_gradient e4m3",
	"grouped_gemm_weight_gradient e4m3 alone",
] as const;

/** Name of an operation with a rate of its own, with the rounding of its products where that changes its kernels. */
export type RatedName = OperationName | (typeof roundedNames)[number];

export function ratedName(name: OperationName, v: OperationValues): RatedName {
	if (v.recipe !== MlpRecipe.e4m3Blockwise) return name;
	switch (name) {
		case "grouped_mlp_forward":
			return `${name} e4m3${rowsOf(v.x, v.x_e4m3)}`;
		case "grouped_mlp_backward":
			return `${name} e4m3${rowsOf(v.dy, v.dy_e4m3)}`;
		case "grouped_gemm":
			return `${name} e4m3`;
		case "grouped_gemm_weight_gradient":
			return v.x_dtype === Dtype.u8 ? `${name} e4m3 alone` : `${name} e4m3`;
		default:
			return name;
	}
}

/** By the pointers to rows as they are and in e4m3, null (0) where they are not given. */
function rowsOf(asTheyAre: number | undefined, rounded: number | undefined): "" | " rounding" | " alone" {
	if (!rounded) return " rounding";
	return asTheyAre ? "" : " alone";
}

const size = (dtype: number | undefined): number => (dtype === Dtype.bf16 ? 2 : dtype === Dtype.u8 ? 1 : 4);

/** Operations whose work workOf() counts by a formula of their own. */
type OwnFormula =
	| "gemm"
	| "gelu_gemm_forward"
	| "gelu_gemm_backward"
	| "grouped_gemm"
	| "grouped_gemm_weight_gradient"
	| "moe_permute"
	| "e4m3_matrices"
	| "e4m3_rows"
	| "grouped_mlp_forward"
	| "grouped_mlp_backward"
	| "attention_forward"
	| "attention_backward"
	| "latent_heads_forward"
	| "latent_heads_backward"
	| "ssd_forward"
	| "ssd_backward"
	| "gated_delta_forward"
	| "gated_delta_backward"
	| "adamw"
	| "muon_update";

/** Elements read and written by all other operations: operands of rows × width. */
const operands: Readonly<Record<Exclude<OperationName, OwnFormula>, number>> = {
	rms_norm_forward: 2,
	rms_norm_backward: 3,
	head_norm_forward: 2,
	head_norm_backward: 3,
	layer_norm_forward: 2,
	layer_norm_backward: 3,
	activation_forward: 2,
	activation_backward: 3,
	causal_conv1d_forward: 2,
	causal_conv1d_backward: 3,
	causal_conv1d_step: 3,
	ssd_step: 3,
	attention_sinks_forward: 2,
	attention_sinks_backward: 2,
	gated_delta_step: 3,
	gate_forward: 3,
	gate_backward: 5,
	attention_step: 3,
	rope_forward: 2,
	moe_unpermute: 2,
	expert_exchange_plan: 1,
	moe_token_nodes: 4,
	moe_node_experts: 4,
	embedding_forward: 2,
	embedding_backward: 3,
	mask_factors_forward: 1,
	mask_factors_backward: 1,
	mask_columns_forward: 3,
	mask_columns_backward: 3,
	masked_rms_norm_forward: 2,
	masked_rms_norm_backward: 3,
	masked_activation_forward: 2,
	masked_activation_backward: 3,
	mask_scores_forward: 2,
	mask_scores_backward: 3,
	kl_statistics: 2,
	kl_loss: 1,
	kl_backward: 3,
	hidden_loss_forward: 2,
	hidden_loss_backward: 3,
	cross_entropy_statistics: 1,
	cross_entropy_backward: 2,
	axpby: 3,
	add: 3,
	fill: 1,
	dropout: 2,
	column_sum: 1,
	grouped_bias_forward: 2,
	grouped_bias_backward: 1,
	spmm: 3,
	scale: 2,
	sum_of_squares: 1,
	count_zeros: 1,
	checksum: 1,
	find_nonfinite: 1,
	router_forward: 4,
	router_backward: 5,
	router_balancing_loss: 1,
	router_z_loss: 1,
	router_bias_update: 1,
	moe_sort: 1,
	cross_entropy_loss: 1,
	masked_sum: 1,
	philox_fill: 1,
	clip_factor: 1,
	adam_advance: 1,
	muon_momentum: 4,
	muon_normalize: 3,
};

/** Rows × width, in elements. */
function elementsOf(name: OperationName, v: OperationValues): number {
	// Its field named rows is a pointer.
	if (name === "moe_unpermute") return v.tokens! * v.topk! * v.width!;
	if (v.elements !== undefined) return v.elements * (v.matrices ?? 1);
	if (name === "moe_token_nodes" || name === "moe_node_experts") return (v.tokens ?? v.rows!) * v.topk!;
	const rows = v.rows ?? v.tokens ?? 0;
	const width = v.width && v.channels === undefined ? v.width : (v.channels ?? v.vocabulary_rows ?? v.experts ?? 1);
	return rows * width;
}

export function workOf(name: OperationName, v: OperationValues): Work {
	switch (name) {
		case "gemm": {
			const batch = Math.max(1, v.batch!);
			const [a, b, c] = [v.m! * v.k!, v.k! * v.n!, v.m! * v.n!];
			const results = c * size(v.c_dtype) * (v.beta === 0 ? 1 : 2);
			const bytes = a * size(v.a_dtype) + b * size(v.b_dtype) + results;
			return { flops: 2 * v.m! * v.n! * v.k! * batch, bytes: batch * bytes };
		}
		case "gelu_gemm_forward":
		case "gelu_gemm_backward": {
			// The wide side has the input and the output of the GELU, or their gradients.
			const wide = name === "gelu_gemm_forward" ? v.outputs! : v.inputs!;
			const bytes = v.rows! * (v.inputs! + v.outputs! + wide) + v.inputs! * v.outputs!;
			return { flops: 2 * v.rows! * v.inputs! * v.outputs!, bytes: bytes * size(v.dtype) };
		}
		case "grouped_gemm":
		case "grouped_gemm_weight_gradient": {
			// Matrices are read, or written, or read and written where the gradient is added.
			const matrices = v.groups! * v.n! * v.k! * 4 * (v.accumulate ? 2 : 1);
			// Rounded rows are written and read, a byte an element.
			const rounded = v.recipe === MlpRecipe.e4m3Blockwise ? 2 : 0;
			const ofRow = v.n! * (size(v.a_dtype ?? v.dy_dtype) + rounded) + v.k! * (size(v.a_dtype ?? v.x_dtype) + rounded);
			return { flops: 2 * v.rows! * v.n! * v.k!, bytes: v.rows! * ofRow + matrices };
		}
		case "moe_permute": {
			// A token is read once.
			const [read, written] = [v.tokens! * v.width!, v.tokens! * v.topk! * v.width!];
			const asTheyAre = v.rows === 0 ? read : read + written;
			return { flops: 0, bytes: asTheyAre * size(v.dtype) + (v.e4m3 ? written : 0) };
		}
		case "e4m3_rows":
			return { flops: 0, bytes: v.rows! * v.width! * (size(v.dtype) + 1) };
		case "e4m3_matrices":
			return { flops: 0, bytes: v.count! * v.rows! * v.width! * (size(v.dtype) + (v.transposed === 0 ? 1 : 2)) };
		case "grouped_mlp_forward":
		case "grouped_mlp_backward": {
			const gated = isGatedCode(v.kind!);
			const perExpert = v.hidden! * v.width! * (gated ? 3 : 2);
			const matrices = v.groups! * perExpert * (v.recipe === MlpRecipe.e4m3Blockwise ? 1 : size(v.dtype));
			// x, z, y and the rows between; backward reads z and writes as much again.
			const columns = 2 * v.hidden! + (gated ? 4 : 3) * v.width! * (name === "grouped_mlp_forward" ? 1 : 2);
			return { flops: 2 * v.rows! * perExpert, bytes: v.rows! * columns * size(v.dtype) + matrices };
		}
		case "attention_forward":
		case "attention_backward": {
			const length = v.sequences! > 0 ? v.tokens! / v.sequences! : 0;
			const pairs = v.tokens! * length * (v.mask === 1 ? 0.5 : 1);
			const columns = v.head_dim! + v.value_dim!;
			const forward = 2 * pairs * v.query_heads! * columns;
			const bytes = v.tokens! * (v.query_heads! + v.key_heads!) * columns * size(v.dtype);
			return name === "attention_forward" ? { flops: forward, bytes } : { flops: 2 * forward, bytes: 2 * bytes };
		}
		case "latent_heads_forward":
		case "latent_heads_backward": {
			// Read and written, but for the columns that all heads share.
			const ofHead = 4 * v.content_dim! + 3 * v.position_dim! + 2 * v.value_dim!;
			return { flops: 0, bytes: v.tokens! * (v.heads! * ofHead + v.position_dim!) * size(v.dtype) };
		}
		case "ssd_forward":
		case "ssd_backward": {
			const [H, P, G, N, Q] = [v.heads!, v.head_dim!, v.groups!, v.state_dim!, v.chunk_size!];
			const forward = v.tokens! * (2 * Q * N * G + 2 * Q * P * H + 4 * P * N * H);
			const bytes = v.tokens! * (3 * H * P + 2 * G * N + H) * size(v.dtype);
			return name === "ssd_forward" ? { flops: forward, bytes } : { flops: 2 * forward, bytes: 2 * bytes };
		}
		case "gated_delta_forward":
		case "gated_delta_backward": {
			const [keys, dk, values, dv] = [v.key_heads!, v.key_dim!, v.value_heads!, v.value_dim!];
			// Three products with the state, and of pairs of tokens of a chunk of 64: two of keys, the triangular system, the values'.
			const forward = v.tokens! * (6 * dk * dv * values + 64 * (4 * dk * keys + 3 * dv * values));
			const bytes = v.tokens! * (2 * dk * keys + (2 * dv + 2) * values) * size(v.dtype);
			return name === "gated_delta_forward" ? { flops: forward, bytes } : { flops: 3 * forward, bytes: 2 * bytes };
		}
		case "causal_conv1d_forward":
		case "causal_conv1d_backward": {
			const flops = 2 * v.tokens! * v.channels! * v.width! * (name === "causal_conv1d_forward" ? 1 : 2);
			return { flops, bytes: operands[name] * v.tokens! * v.channels! * size(v.dtype) };
		}
		case "muon_update":
			return { flops: 0, bytes: v.elements! * (4 * 3 + (v.model === 0 ? 0 : size(v.model_dtype))) };
		case "adamw": {
			// Masters and moments are read and written.
			const moments = 2 * (size(v.exp_avg_dtype) + size(v.exp_avg_sq_dtype));
			return { flops: 0, bytes: v.elements! * (4 * 3 + moments + (v.model === 0 ? 0 : 2)) };
		}
		default: {
			const dtype = v.dtype ?? v.x_dtype ?? v.student_dtype;
			// A norm that adds a residual reads that too, and writes the sum.
			const count = operands[name] + (v.residual ? 2 : 0);
			return { flops: 0, bytes: count * elementsOf(name, v) * size(dtype) };
		}
	}
}

const products: readonly RatedName[] = [
	"gemm",
	"gelu_gemm_forward",
	"gelu_gemm_backward",
	"grouped_gemm",
	"grouped_gemm_weight_gradient",
	"grouped_mlp_forward",
	"grouped_mlp_backward",
	...roundedNames,
	"attention_forward",
	"attention_backward",
	"ssd_forward",
	"ssd_backward",
	"gated_delta_forward",
	"gated_delta_backward",
];

/** Whether an operation's time follows its floating-point operations. */
export function isProduct(name: RatedName): boolean {
	return products.includes(name);
}

/** The amount that an operation's time is proportional to: operations for a product, bytes otherwise; at least 1. */
export function amountOf(name: RatedName, { flops, bytes }: Work): number {
	return Math.max(1, isProduct(name) ? flops : bytes);
}
