/** Qwen3 and Qwen3-MoE: as Llama, with a norm of every query and key head; experts with a softmax router. */

import { decoderFamily } from "./decoder.ts";
import { type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";
import { readSlidingWindow, writtenSlidingWindow } from "./qwen2.ts";

const common = {
	maxPositionEmbeddings: 32768,
	only: { use_sliding_window: false, attention_bias: false },
} as const;

export const qwen3 = decoderFamily({
	...common,
	modelType: "qwen3",
	architecture: "Qwen3ForCausalLM",
	sizes: { intermediate_size: 22016, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 151936 },
	headDim: 128,
	only: { attention_bias: false },
	read: (values, bad, layers) => ({ qkLayernorm: true, ...readSlidingWindow(values, bad, layers) }),
	write: writtenSlidingWindow,
	describes: ({ qkLayernorm, numExperts }) => qkLayernorm === true && numExperts === 0,
});

export const qwen3Moe = decoderFamily({
	...common,
	modelType: "qwen3_moe",
	architecture: "Qwen3MoeForCausalLM",
	sizes: {
		...{ hidden_size: 2048, intermediate_size: 6144, num_hidden_layers: 24, num_attention_heads: 32 },
		...{ num_key_value_heads: 4, vocab_size: 151936 },
	},
	read: (values, bad) => ({ qkLayernorm: true, ...experts(values, bad) }),
	hasExperts: (values, layer) => {
		const { mlp_only_layers: dense, decoder_sparse_step: step } = values;
		return !(Array.isArray(dense) && dense.includes(layer)) && (layer + 1) % Number(step ?? 1) === 0;
	},
	write: (c, kinds) => ({
		num_experts: c.numExperts,
		num_experts_per_tok: c.moeRouterTopk,
		moe_intermediate_size: c.moeFfnHiddenSize,
		norm_topk_prob: !c.moeRouterPreSoftmax,
		decoder_sparse_step: 1,
		mlp_only_layers: kinds.flatMap((kind, layer) => (kind === "mlp" ? [layer] : [])),
		output_router_logits: false,
	}),
	describes: ({ qkLayernorm, numExperts }) => qkLayernorm === true && numExperts > 0,
});

function experts(values: Json, bad: Refuse): Partial<LanguageModelConfiguration> {
	const { norm_topk_prob: normalised = false } = values;
	return {
		numExperts: whole(values, values.num_experts === undefined ? "num_local_experts" : "num_experts", 128, bad),
		moeRouterTopk: whole(values, "num_experts_per_tok", 8, bad),
		moeFfnHiddenSize: whole(values, "moe_intermediate_size", 768, bad),
		moeRouterPreSoftmax: normalised !== true,
	};
}
