/** Fields that several formats of reference folders have, as entries of valibot schemas. */
import * as v from "valibot";

/** The model and the batches of Megatron's own references, in config.json. */
export const describedRun = {
	pattern: v.string(),
	vocab_size: v.number(),
	seq: v.number(),
	batch: v.number(),
	microbatches: v.number(),
	layernorm_epsilon: v.number(),
};

/** Sizes of a hybrid model in Megatron's `transformer_config`. */
export const modelSizes = {
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
};

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

/** How every reference's experts are computed. */
export const referenceExperts = {
	interleave: 0,
	fused: "auto",
	recipe: "plain",
	weightGradientRecipe: "plain",
} as const;

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
