/** Llama: grouped-query attention and SwiGLU, rotary embeddings with Llama 3's scaling, biases in all projections, in attention's or in none. */
import { decoderFamily } from "./decoder.ts";

export const llama = decoderFamily({
	modelType: "llama",
	architecture: "LlamaForCausalLM",
	sizes: { intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 32000 },
	maxPositionEmbeddings: 2048,
	only: { pretraining_tp: 1 },
	read: (values, bad) => {
		const { attention_bias: attention = false, mlp_bias: mlp = false } = values;
		if (mlp === true && attention !== true) {
			bad(
				`mlp_bias is true and attention_bias ${attention}; this program's model has the former's only beside the latter's`,
			);
		}
		return { addBiasLinear: mlp === true, addAttentionBias: attention === true && mlp !== true };
	},
	write: ({ addBiasLinear, addAttentionBias }) => ({
		attention_bias: addBiasLinear || addAttentionBias === true,
		mlp_bias: addBiasLinear,
	}),
	describes: ({ addQkvBias, qkLayernorm, windowSize, numExperts }) =>
		!addQkvBias && !qkLayernorm && !windowSize && numExperts === 0,
});
