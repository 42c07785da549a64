/**
 * DeepSeek-V3 (docs/spec/families.md §2.4; routing as in docs/spec/language-model.md §4): multi-latent attention, first layers dense, then experts with a sigmoid router
 * of groups and a shared expert; multi-token prediction in the layers after the last.
 */

import { hasLayer } from "../../../config/hybrid-pattern.ts";
import { decoderFamily } from "./decoder.ts";
import { type Json, type LanguageModelConfiguration, type LayerNames, type Refuse, whole } from "./family.ts";
import { hasExperts, layersAhead, readExperts, writtenExperts } from "./grouped-experts.ts";
import { readPositions, writtenPositions } from "./positions.ts";

/** Norms of the latents have this ε, whatever rms_norm_eps is. */
const latentNormEpsilon = 1e-6;

/** Whole numbers by their keys: field and default. */
const latentSizes = {
	kvLoraRank: ["kv_lora_rank", 512],
	qkHeadDim: ["qk_nope_head_dim", 128],
	qkPosEmbHeadDim: ["qk_rope_head_dim", 64],
	vHeadDim: ["v_head_dim", 128],
} as const;
const routing = {
	...{ n_routed_experts: 256, num_experts_per_tok: 8, moe_intermediate_size: 2048, n_group: 8, topk_group: 4 },
	...{ n_shared_experts: 1, routed_scaling_factor: 2.5, first_k_dense_replace: 3 },
};

export const deepseekV3 = decoderFamily({
	modelType: "deepseek_v3",
	architecture: "DeepseekV3ForCausalLM",
	sizes: {
		...{ hidden_size: 7168, intermediate_size: 18432, num_hidden_layers: 61, num_attention_heads: 128 },
		vocab_size: 129280,
	},
	maxPositionEmbeddings: 4096,
	defaults: routing,
	headDim: "derived",
	only: { attention_bias: false, scoring_func: "sigmoid", topk_method: "noaux_tc", moe_layer_freq: 1 },
	mixer: "latentAttention",
	names: { latentAttention: latentAttentionNames },
	hasExperts,
	ahead: layersAhead(61),
	read,
	write: (c, kinds) => ({
		...writtenPositions({ ...c, positionEmbeddingType: c.ropeType ?? "yarn" }),
		q_lora_rank: c.qLoraRank,
		...Object.fromEntries(
			Object.entries(latentSizes).map(([key, [name]]) => [name, c[key as keyof typeof latentSizes]]),
		),
		rope_interleave: c.rotaryInterleaved,
		...writtenExperts(c, kinds),
	}),
	describes: ({ qkLayernorm, hybridLayerPattern, moeRouterScoreFunction: score, moeRouterEnableExpertBias: bias }) =>
		qkLayernorm === true && (!hasLayer(hybridLayerPattern, "moe") || (score === "sigmoid" && bias)),
});

function read(values: Json, bad: Refuse, layers: number): Partial<LanguageModelConfiguration> {
	const { q_lora_rank: queryRank, rope_interleave: interleaved = true, num_attention_heads: heads = 128 } = values;
	const { num_key_value_heads: ofKeys = heads } = values;
	if (ofKeys !== null && ofKeys !== heads) {
		bad(
			`num_key_value_heads is ${JSON.stringify(ofKeys)} and num_attention_heads ${JSON.stringify(heads)}: every head of latent attention has its own keys`,
		);
	}
	if (typeof interleaved !== "boolean")
		bad(`rope_interleave is ${JSON.stringify(interleaved)}, expected true or false`);
	return {
		qkLayernorm: true,
		latentNormEpsilon,
		rotaryInterleaved: interleaved as boolean,
		ropeType: ropeTypeOf(values, bad),
		qLoraRank: queryRank === null ? null : whole(values, "q_lora_rank", 1536, bad),
		...Object.fromEntries(
			Object.entries(latentSizes).map(([key, [name, missing]]) => [key, whole(values, name, missing, bad)]),
		),
		...readExperts(values, bad, layers),
	};
}

/** YaRN or none; transformers scales scores by mscale_all_dim alone, and Megatron's YaRN has both or neither. */
function ropeTypeOf(values: Json, bad: Refuse): "rope" | "yarn" {
	const { positionEmbeddingType: type = "rope", ...scaling } = readPositions(
		values,
		bad,
	) as Partial<LanguageModelConfiguration>;
	const given = (values.rope_parameters ?? values.rope_scaling ?? {}) as Json;
	if (scaling.useRopeScaling || scaling.rotarySeqLenInterpolationFactor != null) {
		bad(
			`rope_type is ${JSON.stringify(given.rope_type ?? given.type)}; "default" and "yarn" can be read for multi-latent attention`,
		);
	}
	if (given.mscale_all_dim && !given.mscale)
		bad("mscale_all_dim is given without mscale, and both or neither can be read");
	return type === "yarn" ? "yarn" : "rope";
}

function latentAttentionNames({ builder, c, logical, foreign }: LayerNames): void {
	const { hiddenSize: h, numAttentionHeads: heads, qLoraRank: queryRank = null } = c;
	const [rank, content, position, value] = [c.kvLoraRank!, c.qkHeadDim!, c.qkPosEmbHeadDim!, c.vHeadDim!];
	const same = (mine: string, theirs: string, shape: readonly number[]) =>
		builder.same(`${logical}self_attention.${mine}`, `${foreign}self_attn.${theirs}.weight`, shape);
	builder.same(`${logical}input_layernorm.weight`, `${foreign}input_layernorm.weight`, [h]);
	const queryRows = heads * (content + position);
	if (queryRank === null) same("linear_q_proj.weight", "q_proj", [queryRows, h]);
	else {
		same("linear_q_down_proj.weight", "q_a_proj", [queryRank, h]);
		same("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", [queryRank]);
		same("linear_q_up_proj.weight", "q_b_proj", [queryRows, queryRank]);
	}
	same("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", [rank + position, h]);
	same("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", [rank]);
	same("linear_kv_up_proj.weight", "kv_b_proj", [heads * (content + value), rank]);
	same("linear_proj.weight", "o_proj", [h, heads * value]);
}
