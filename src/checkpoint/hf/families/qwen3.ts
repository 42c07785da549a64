/** Qwen3 and Qwen3-MoE: as Llama, with a norm of every query and key head; experts with a softmax router. */

import type { LayerKind } from "../../../config/hybrid-pattern.ts";
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

/** The base that transformers' class has where config.json has none. */
const basis = (values: Json): Json => ({ ...values, rope_theta: values.rope_theta ?? 500_000 });

/** The text of Qwen3-VL: Qwen3, whose rotary embeddings turn by time, row and column. */
export const qwen3VlText = decoderFamily({
	modelType: "qwen3_vl_text",
	architecture: "Qwen3VLTextModel",
	sizes: { intermediate_size: 22016, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 151936 },
	maxPositionEmbeddings: 128_000,
	headDim: 128,
	positions: basis,
	only: { attention_bias: false },
	read: () => ({ qkLayernorm: true }),
	write: () => ({}),
	describes: (c) => isQwen3Vl(c) && c.numExperts === 0,
});

export const qwen3VlMoeText = decoderFamily({
	modelType: "qwen3_vl_moe_text",
	architecture: "Qwen3VLMoeTextModel",
	sizes: {
		...{ hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 24, num_attention_heads: 16 },
		...{ num_key_value_heads: 16, vocab_size: 151936 },
	},
	maxPositionEmbeddings: 128_000,
	positions: basis,
	only: { attention_bias: false },
	read: (values, bad) => ({
		qkLayernorm: true,
		...readExperts({ ...values, norm_topk_prob: true }, bad, { experts: 60, topk: 4, width: 1408, normalised: true }),
	}),
	hasExperts,
	write: writtenExperts,
	describes: (c) => isQwen3Vl(c) && c.numExperts > 0,
});

function isQwen3Vl({ qkLayernorm, mropeSection }: LanguageModelConfiguration): boolean {
	return qkLayernorm === true && (mropeSection ?? null) !== null;
}

export const qwen3Moe = decoderFamily({
	...common,
	modelType: "qwen3_moe",
	architecture: "Qwen3MoeForCausalLM",
	sizes: {
		...{ hidden_size: 2048, intermediate_size: 6144, num_hidden_layers: 24, num_attention_heads: 32 },
		...{ num_key_value_heads: 4, vocab_size: 151936 },
	},
	read: (values, bad) => ({
		qkLayernorm: true,
		...readExperts(values, bad, { experts: 128, topk: 8, width: 768, normalised: false }),
	}),
	hasExperts,
	write: writtenExperts,
	describes: ({ qkLayernorm, numExperts }) => qkLayernorm === true && numExperts > 0,
});

/** Whether a layer has experts, by mlp_only_layers and decoder_sparse_step. */
export function hasExperts({ mlp_only_layers: dense, decoder_sparse_step: step }: Json, layer: number): boolean {
	return !(Array.isArray(dense) && dense.includes(layer)) && (layer + 1) % Number(step ?? 1) === 0;
}

/** `defaults`: of the family. */
export function readExperts(
	values: Json,
	bad: Refuse,
	defaults: { readonly experts: number; readonly topk: number; readonly width: number; readonly normalised: boolean },
): Partial<LanguageModelConfiguration> {
	const count = values.num_experts === undefined ? "num_local_experts" : "num_experts";
	return {
		numExperts: whole(values, count, defaults.experts, bad),
		moeRouterTopk: whole(values, "num_experts_per_tok", defaults.topk, bad),
		moeFfnHiddenSize: whole(values, "moe_intermediate_size", defaults.width, bad),
		moeRouterPreSoftmax: (values.norm_topk_prob ?? defaults.normalised) !== true,
	};
}

export function writtenExperts(c: LanguageModelConfiguration, kinds: readonly LayerKind[]) {
	return {
		num_experts: c.numExperts,
		num_experts_per_tok: c.moeRouterTopk,
		moe_intermediate_size: c.moeFfnHiddenSize,
		norm_topk_prob: !c.moeRouterPreSoftmax,
		decoder_sparse_step: 1,
		mlp_only_layers: kinds.flatMap((kind, layer) => (kind === "mlp" ? [layer] : [])),
		output_router_logits: false,
	};
}
