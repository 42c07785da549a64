/**
 * DeepSeek-V3 (docs/spec/families.md §2.4; routing as in docs/spec/language-model.md §4): multi-latent attention, first layers dense, then experts with a sigmoid router
 * of groups and a shared expert; multi-token prediction in the layers after the last.
 */

import { hasLayer } from "../../../config/hybrid-pattern.ts";
import { decoderFamily } from "./decoder.ts";
import {
	count,
	fraction,
	type Json,
	type LanguageModelConfiguration,
	type LayerNames,
	type Refuse,
	whole,
} from "./family.ts";
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
const expertSizes = {
	numExperts: ["n_routed_experts", 256],
	moeRouterTopk: ["num_experts_per_tok", 8],
	moeFfnHiddenSize: ["moe_intermediate_size", 2048],
	moeRouterNumGroups: ["n_group", 8],
	moeRouterGroupTopk: ["topk_group", 4],
} as const;

export const deepseekV3 = decoderFamily({
	modelType: "deepseek_v3",
	architecture: "DeepseekV3ForCausalLM",
	sizes: {
		...{ hidden_size: 7168, intermediate_size: 18432, num_hidden_layers: 61, num_attention_heads: 128 },
		vocab_size: 129280,
	},
	maxPositionEmbeddings: 4096,
	headDim: "derived",
	only: { attention_bias: false, scoring_func: "sigmoid", topk_method: "noaux_tc", moe_layer_freq: 1 },
	mixer: "latentAttention",
	names: { latentAttention: latentAttentionNames },
	hasExperts: (values, layer) => layer >= Number(values.first_k_dense_replace ?? 3),
	ahead: {
		field: "num_nextn_predict_layers",
		depthOf:
			({ num_hidden_layers: layers = 61 }) =>
			(name) => {
				const index = Number(/^model\.layers\.(\d+)\./.exec(name)?.[1] ?? -1);
				return index >= Number(layers) ? index - Number(layers) : null;
			},
		most: 64,
		places: (base, index) => ({
			own: `${base}layers.${index}.`,
			layer: `${base}layers.${index}.`,
			names: { enorm: "enorm", hnorm: "hnorm", eh_proj: "eh_proj", final_layernorm: "shared_head.norm" },
		}),
	},
	read,
	write: (c, kinds) => ({
		...writtenPositions({ ...c, positionEmbeddingType: c.ropeType ?? "yarn" }),
		q_lora_rank: c.qLoraRank,
		...Object.fromEntries(
			[...Object.entries(latentSizes), ...Object.entries(kinds.includes("moe") ? expertSizes : {})].map(
				([key, [name]]) => [name, c[key as keyof typeof latentSizes | keyof typeof expertSizes]],
			),
		),
		rope_interleave: c.rotaryInterleaved,
		first_k_dense_replace: kinds.indexOf("moe") < 0 ? kinds.length : kinds.indexOf("moe"),
		n_shared_experts: Math.floor(c.moeSharedExpertIntermediateSize / c.moeFfnHiddenSize),
		norm_topk_prob: c.moeRouterTopk > 1,
		routed_scaling_factor: c.moeRouterTopkScalingFactor,
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
	const sizes = (table: Readonly<Record<string, readonly [string, number]>>) =>
		Object.fromEntries(Object.entries(table).map(([key, [name, missing]]) => [key, whole(values, name, missing, bad)]));
	const dense = count(values, "first_k_dense_replace", 3, bad);
	const routed = dense < layers || count(values, "num_nextn_predict_layers", 0, bad) > 0;
	return {
		qkLayernorm: true,
		latentNormEpsilon,
		rotaryInterleaved: interleaved as boolean,
		ropeType: ropeTypeOf(values, bad),
		qLoraRank: queryRank === null ? null : whole(values, "q_lora_rank", 1536, bad),
		...sizes(latentSizes),
		...(routed && experts(values, bad, sizes(expertSizes) as Record<keyof typeof expertSizes, number>)),
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

function experts(
	values: Json,
	bad: Refuse,
	sizes: Readonly<Record<keyof typeof expertSizes, number>>,
): Partial<LanguageModelConfiguration> {
	const { moeRouterTopk: topk, moeRouterNumGroups: groups, moeRouterGroupTopk: kept, numExperts } = sizes;
	// As in Megatron, the scores of the chosen experts are normalised unless only one is chosen.
	const { norm_topk_prob: normalised = true } = values;
	if (normalised !== topk > 1) {
		bad(
			`norm_topk_prob is ${JSON.stringify(normalised)} where num_experts_per_tok is ${topk}, this program's model has only ${topk > 1} there`,
		);
	}
	if (numExperts % groups !== 0) bad(`n_routed_experts is ${numExperts}, no multiple of n_group (${groups})`);
	if (kept < groups && Math.floor(topk / kept) !== 2) {
		bad(
			`num_experts_per_tok is ${topk} and topk_group ${kept}: transformers scores a group by its two best experts, this ` +
				"program, as Megatron, by num_experts_per_tok / topk_group of them, which has to be 2 too",
		);
	}
	return {
		...sizes,
		moeSharedExpertIntermediateSize: count(values, "n_shared_experts", 1, bad) * sizes.moeFfnHiddenSize,
		moeRouterScoreFunction: "sigmoid",
		moeRouterEnableExpertBias: true,
		moeRouterTopkScalingFactor: fraction(values, "routed_scaling_factor", 2.5, bad),
	};
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
