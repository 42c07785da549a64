/** GLM-4.5 and the text of GLM-4.5V: attention with partial rotary embeddings, experts as DeepSeek-V3's. */
import { pythonFloat } from "../json.ts";
import { decoderFamily } from "./decoder.ts";
import type { Json, LanguageModelConfiguration, Refuse } from "./family.ts";
import { hasExperts, layersAhead, readExperts, writtenExperts } from "./grouped-experts.ts";

const routing = {
	...{ n_routed_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 1408, n_group: 1, topk_group: 1 },
	...{ n_shared_experts: 1, routed_scaling_factor: 1, first_k_dense_replace: 1 },
};

const common = {
	sizes: {
		...{ hidden_size: 4096, intermediate_size: 10944, num_hidden_layers: 46, num_attention_heads: 96 },
		num_key_value_heads: 8,
	},
	only: {},
	// Half of a head turns where no file says how much.
	positions: (values: Json): Json => ({ ...values, partial_rotary_factor: values.partial_rotary_factor ?? 0.5 }),
	hasExperts: hasExperts(routing),
	write: (c: LanguageModelConfiguration, kinds: Parameters<typeof writtenExperts>[1]): Json => ({
		partial_rotary_factor: pythonFloat(c.rotaryPercent ?? 1),
		attention_bias: c.addQkvBias === true,
		...writtenExperts(c, kinds),
	}),
} as const;

/** `biased`: whether queries, keys and values have biases where config.json does not say. */
function read(values: Json, bad: Refuse, layers: number, biased: boolean): Partial<LanguageModelConfiguration> {
	const flag = (name: string, missing: boolean): boolean => {
		const value = values[name] ?? missing;
		return typeof value === "boolean" ? value : bad(`${name} is ${JSON.stringify(value)}, expected true or false`);
	};
	return {
		addQkvBias: flag("attention_bias", biased),
		qkLayernorm: flag("use_qk_norm", false),
		normEpsilon: Number(values.rms_norm_eps ?? 1e-5),
		...readExperts({ ...routing, ...values }, bad, layers),
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
	maxPositionEmbeddings: 131072,
	ahead: layersAhead(46),
	read: (values, bad, layers) => read(values, bad, layers, false),
	write: (c, kinds) => ({ ...common.write(c, kinds), use_qk_norm: c.qkLayernorm === true }),
	describes: isGlm,
});

export const glm4vMoeText = decoderFamily({
	...common,
	modelType: "glm4v_moe_text",
	architecture: "Glm4vMoeTextModel",
	sizes: { ...common.sizes, vocab_size: 151424 },
	maxPositionEmbeddings: 65536,
	only: { use_qk_norm: false },
	read: (values, bad, layers) => read(values, bad, layers, true),
	describes: (c) => isGlm(c) && (c.mropeSection ?? null) !== null && !c.qkLayernorm,
});
