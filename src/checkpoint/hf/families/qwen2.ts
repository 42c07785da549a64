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

/** The text of Qwen2.5-VL: Qwen2, whose rotary embeddings turn by time, row and column. */
export const qwen25VlText = decoderFamily({
	modelType: "qwen2_5_vl_text",
	architecture: "Qwen2_5_VLTextModel",
	sizes: {
		...{ hidden_size: 8192, intermediate_size: 29568, num_hidden_layers: 80, num_attention_heads: 64 },
		...{ num_key_value_heads: 8, vocab_size: 152064 },
	},
	maxPositionEmbeddings: 32768,
	headDim: "derived",
	positions: ({ rope_scaling: scaling, ...values }) => {
		const base = { ...values, rope_theta: values.rope_theta ?? 1_000_000 };
		if (scaling === undefined || scaling === null) return base;
		const { type, rope_type: named = type, ...rest } = scaling as Json;
		// Published files call sections a type of their own.
		return { ...base, rope_scaling: { ...rest, rope_type: named === "mrope" ? "default" : named } };
	},
	only: {},
	read: (values, bad, layers) => ({ addQkvBias: true, ...readSlidingWindow(values, bad, layers) }),
	write: writtenSlidingWindow,
	describes: (c) => qwen2.describes(c) && (c.mropeSection ?? null) !== null,
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
