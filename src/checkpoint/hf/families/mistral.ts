/** Mistral: as Llama without biases, with the same window in every layer. */
import { keysOfWindow } from "../../../config/per-layer.ts";
import { decoderFamily, readWindows } from "./decoder.ts";
import { whole } from "./family.ts";

export const mistral = decoderFamily({
	modelType: "mistral",
	architecture: "MistralForCausalLM",
	sizes: {
		...{ intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32 },
		...{ num_key_value_heads: 8, vocab_size: 32000 },
	},
	maxPositionEmbeddings: 131072,
	only: {},
	read: (values, bad, layers) =>
		// transformers' class has no layer_types.
		readWindows({}, bad, layers, {
			size: values.sliding_window === null ? null : whole(values, "sliding_window", 4096, bad),
			rule: () => true,
		}),
	write: ({ windowSize }) => ({ sliding_window: keysOfWindow(windowSize) }),
	describes: ({ windowSize, addBiasLinear, addAttentionBias, addQkvBias, qkLayernorm, numExperts }) =>
		Boolean(windowSize) && !addBiasLinear && !addAttentionBias && !addQkvBias && !qkLayernorm && numExperts === 0,
});
