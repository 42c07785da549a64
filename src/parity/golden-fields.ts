/** Fields that several formats of reference folders have, as entries of valibot schemas. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import * as v from "valibot";
import { UserError } from "../system/errors.ts";
import { indexLimits, readJsonText } from "../system/json.ts";
import type { LossMean } from "../train/loss-weights.ts";

/** The model and the batches of Megatron's own references, in config.json. */
export const describedRun = {
	pattern: v.string(),
	vocab_size: v.number(),
	seq: v.number(),
	batch: v.number(),
	microbatches: v.number(),
	layernorm_epsilon: v.number(),
};

/** Fields of Megatron's `transformer_config` that decide a hybrid model and its objective. */
const modelFields = {
	hidden_size: v.number(),
	num_attention_heads: v.number(),
	num_query_groups: v.number(),
	kv_channels: v.number(),
	ffn_hidden_size: v.number(),
	num_moe_experts: v.number(),
	moe_router_topk: v.number(),
	moe_ffn_hidden_size: v.number(),
	moe_shared_expert_intermediate_size: v.number(),
	moe_router_topk_scaling_factor: v.number(),
	mamba_num_heads: v.number(),
	mamba_head_dim: v.number(),
	mamba_num_groups: v.number(),
	mamba_state_dim: v.number(),
	moe_aux_loss_coeff: v.number(),
	moe_router_bias_update_rate: v.number(),
	moe_z_loss_coeff: v.optional(v.nullable(v.number()), null),
	mtp_use_repeated_layer: v.optional(v.boolean(), false),
	/** Megatron's default: the mean of the microbatches' means. */
	calculate_per_token_loss: v.optional(v.boolean(), false),
};

/** The only value that the comparison's model has of a field. */
const only = <const Value extends string | number | boolean>(value: Value) => v.optional(v.literal(value));
const unset = v.optional(v.null());
const anyNumber = v.optional(v.number());
const anyBoolean = v.optional(v.boolean());

/** Fields of Megatron's `transformer_config` that nothing here reads, with the values that leave the comparison what it is. */
const unreadFields = {
	// `pattern` has the layers and depths.
	num_layers: anyNumber,
	mtp_num_layers: anyNumber,
	// The weights come with the folder.
	init_method_std: anyNumber,
	// The same sums, computed by other kernels or on other ranks.
	moe_grouped_gemm: anyBoolean,
	moe_permute_fusion: anyBoolean,
	moe_router_fusion: anyBoolean,
	moe_token_dispatcher_type: v.optional(v.string()),
	sequence_parallel: anyBoolean,
	// What `fixed` and the model of these references say too.
	normalization: only("RMSNorm"),
	add_bias_linear: only(false),
	gated_linear_unit: only(false),
	hidden_dropout: only(0),
	attention_dropout: only(0),
	moe_router_dtype: only("fp32"),
	moe_router_score_function: only("sigmoid"),
	moe_router_pre_softmax: only(false),
	moe_router_enable_expert_bias: only(true),
	moe_router_num_groups: unset,
	moe_router_group_topk: unset,
	cross_entropy_loss_fusion: only(false),
	bf16: only(false),
};

/**
 * Megatron's `transformer_config` with the format's own `fields`. A field that is not known is refused: it may change the model or the
 * objective.
 */
export function transformerConfig<const Fields extends v.ObjectEntries>(fields: Fields) {
	return v.strictObject({ ...unreadFields, ...modelFields, ...fields }, ({ expected, received }) =>
		expected === "never"
			? "this field is unknown, so what it does to the model or the objective would not be compared"
			: `expected ${expected} and received ${received}`,
	);
}

/** The mean that the gradient of a reference is of, by its `transformer_config`. */
export function lossMeanOfReference(config: { readonly calculate_per_token_loss: boolean }): LossMean {
	return config.calculate_per_token_loss ? "tokens" : "microbatches";
}

/** The parts of a Megatron model that the references do not vary. */
export const fixedModel = {
	normalization: v.literal("RMSNorm"),
	position_embedding_type: v.literal("none"),
	untied: v.literal(true),
	router_score: v.literal("sigmoid"),
	dropout: v.literal(0),
	mamba_chunk: v.number(),
	conv_width: v.number(),
	bias: v.literal(false),
};

/** AdamW of a reference with a constant learning rate. */
export const adamW = {
	name: v.literal("AdamW"),
	lr: v.number(),
	betas: v.tuple([v.number(), v.number()]),
	eps: v.number(),
	weight_decay: v.number(),
	clip_grad: v.number(),
	schedule: v.literal("constant"),
};

/** Statistics of a tensor, and its first elements. */
export const valueProbe = v.object({
	mean: v.number(),
	rms: v.number(),
	absmax: v.number(),
	head: v.array(v.number()),
});

// JSON files of reference folders. Errors name the file and the field.

/** Reads a file and checks it. */
export function readReferenceJson<Schema extends v.GenericSchema>(schema: Schema, path: string): v.InferOutput<Schema> {
	const result = v.safeParse(schema, readJson(path));
	if (result.success) return result.output;
	const issue = result.issues[0];
	throw new UserError(`${path}: ${v.getDotPath(issue) ?? "the file"}: ${issue.message}.`);
}

/** Whether config.json of the folder is there and has all these keys. */
export function configurationHas(folder: string, ...keys: readonly string[]): boolean {
	const path = join(folder, "config.json");
	if (!existsSync(path)) return false;
	const config = readJson(path);
	return typeof config === "object" && config !== null && keys.every((key) => key in config);
}

function readJson(path: string): unknown {
	if (!existsSync(path)) throw new UserError(`${path} is missing.`);
	const text = readJsonText(path, indexLimits);
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new UserError(`${path} is not JSON: ${(error as Error).message}.`);
	}
}

/** Exactly these keys, or a UserError that names the first that is missing or unknown. */
export function requireKeys(what: string, found: Readonly<Record<string, unknown>>, wanted: readonly string[]): void {
	const missing = wanted.find((name) => !(name in found));
	if (missing !== undefined) throw new UserError(`${what} has no ${missing}.`);
	const known = new Set(wanted);
	const unknown = Object.keys(found).find((name) => !known.has(name));
	if (unknown !== undefined) throw new UserError(`${what} has ${unknown}, which the model does not have.`);
}
