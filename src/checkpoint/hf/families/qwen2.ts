/** Qwen2: as Llama, with biases in the query, key and value projections alone. */
import { decoderFamily, fullAttention } from "./decoder.ts";

export const qwen2 = decoderFamily({
	modelType: "qwen2",
	architecture: "Qwen2ForCausalLM",
	sizes: { intermediate_size: 22016, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 151936 },
	maxPositionEmbeddings: 32768,
	headDim: "derived",
	only: { use_sliding_window: false },
	read: (values, bad) => {
		fullAttention(values, bad);
		return { addQkvBias: true };
	},
	write: () => ({}),
	describes: ({ addQkvBias, qkLayernorm, numExperts }) => addQkvBias === true && !qkLayernorm && numExperts === 0,
});
