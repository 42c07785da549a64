/** Qwen2: as Llama, with biases in the query, key and value projections alone. */
import { decoderFamily, readWindows, writtenWindows } from "./decoder.ts";
import { type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";

export const qwen2 = decoderFamily({
	modelType: "qwen2",
	architecture: "Qwen2ForCausalLM",
	sizes: { intermediate_size: 22016, num_hidden_layers: 32, num_attention_heads: 32, vocab_size: 151936 },
	maxPositionEmbeddings: 32768,
	headDim: "derived",
	only: {},
	read: (values, bad, layers) => ({ addQkvBias: true, ...readSlidingWindow(values, bad, layers) }),
	write: writtenSlidingWindow,
	describes: ({ addQkvBias, qkLayernorm, numExperts }) => addQkvBias === true && !qkLayernorm && numExperts === 0,
});

/** Windows of Qwen2 and Qwen3: of the layers from max_window_layers on, if use_sliding_window is true. */
export function readSlidingWindow(values: Json, bad: Refuse, layers: number) {
	const first = values.max_window_layers ?? 28;
	return readWindows(values, bad, layers, {
		size: values.use_sliding_window === true ? whole(values, "sliding_window", 4096, bad) : null,
		rule: (layer) => layer >= Number(first),
	});
}

export function writtenSlidingWindow(c: LanguageModelConfiguration): Json {
	return { use_sliding_window: Boolean(c.windowSize), ...(c.windowSize && writtenWindows(c)) };
}
