/** Llama: grouped-query attention and SwiGLU, rotary embeddings with Llama 3's scaling, biases in all projections or none. */
import { decoderFamily } from "./decoder.ts";

export const llama = decoderFamily({
	modelType: "llama",
	architecture: "LlamaForCausalLM",
	sizes: { intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 32000 },
	maxPositionEmbeddings: 2048,
	only: { pretraining_tp: 1 },
	read: (values, bad) => {
		const { attention_bias: attention = false, mlp_bias: mlp = false } = values;
		if (attention !== mlp) {
			bad(`attention_bias is ${attention} and mlp_bias ${mlp}; this program's model has both or neither`);
		}
		return { addBiasLinear: attention === true };
	},
	write: ({ addBiasLinear }) => ({ attention_bias: addBiasLinear, mlp_bias: addBiasLinear }),
	describes: ({ addQkvBias, qkLayernorm, windowSize, numExperts }) =>
		!addQkvBias && !qkLayernorm && !windowSize && numExperts === 0,
});
