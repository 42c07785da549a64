/** GLM-4.5 and the text of GLM-4.5V: attention with partial rotary embeddings, experts as DeepSeek-V3's. */
import { pythonFloat } from "../json.ts";
import { decoderFamily } from "./decoder.ts";
import type { Json, LanguageModelConfiguration, Refuse } from "./family.ts";
import { hasExperts, layersAhead, readExperts, writtenExperts } from "./grouped-experts.ts";

const defaults = {
	...{ n_routed_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 1408, n_group: 1, topk_group: 1 },
	...{ n_shared_experts: 1, routed_scaling_factor: 1, first_k_dense_replace: 1 },
	...{ rms_norm_eps: 1e-5, partial_rotary_factor: 0.5, use_qk_norm: false },
};

const common = {
	sizes: {
		...{ hidden_size: 4096, intermediate_size: 10944, num_hidden_layers: 46, num_attention_heads: 96 },
		num_key_value_heads: 8,
	},
	only: {},
	read,
	hasExperts,
	write: (c: LanguageModelConfiguration, kinds: Parameters<typeof writtenExperts>[1]): Json => ({
		partial_rotary_factor: pythonFloat(c.rotaryPercent ?? 1),
		attention_bias: c.addQkvBias === true,
		...writtenExperts(c, kinds),
	}),
} as const;

function read(values: Json, bad: Refuse, layers: number): Partial<LanguageModelConfiguration> {
	const flag = (name: string): boolean => {
		const value = values[name];
		return typeof value === "boolean" ? value : bad(`${name} is ${JSON.stringify(value)}, expected true or false`);
	};
	return {
		addQkvBias: flag("attention_bias"),
		qkLayernorm: flag("use_qk_norm"),
		...readExperts(values, bad, layers),
	};
}

const isGlm = ({
	moeRouterScoreFunction: score,
	moeRouterEnableExpertBias: bias,
	numExperts,
}: LanguageModelConfiguration) => numExperts > 0 && score === "sigmoid" && bias;

export const glm4Moe = decoderFamily({
	...common,
	modelType: "glm4_moe",
	architecture: "Glm4MoeForCausalLM",
	sizes: { ...common.sizes, vocab_size: 151552 },
	defaults: { ...defaults, attention_bias: false },
	maxPositionEmbeddings: 131072,
	ahead: layersAhead(46),
	write: (c, kinds) => ({ ...common.write(c, kinds), use_qk_norm: c.qkLayernorm === true }),
	describes: isGlm,
});

export const glm4vMoeText = decoderFamily({
	...common,
	modelType: "glm4v_moe_text",
	architecture: "Glm4vMoeTextModel",
	sizes: { ...common.sizes, vocab_size: 151424 },
	defaults: { ...defaults, attention_bias: true },
	maxPositionEmbeddings: 65536,
	only: { use_qk_norm: false },
	describes: (c) => isGlm(c) && (c.mropeSection ?? null) !== null && !c.qkLayernorm,
});
