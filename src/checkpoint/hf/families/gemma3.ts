/** Gemma 3's language model (docs/spec/families.md §2.8): norms before and behind blocks, windows in five layers of six, two bases of rotary embeddings. */
import { keysOfWindow } from "../../../config/per-layer.ts";
import { pythonFloat } from "../json.ts";
import { decoderFamily, readWindows, writtenWindows } from "./decoder.ts";
import { fraction, type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";

/** transformers' defaults. */
const [hiddenSize, heads, headDim, localBase] = [2304, 8, 256, 10000];

export const gemma3 = decoderFamily({
	modelType: "gemma3_text",
	architecture: "Gemma3ForCausalLM",
	sizes: {
		...{ hidden_size: hiddenSize, intermediate_size: 9216, num_hidden_layers: 26, num_attention_heads: heads },
		...{ num_key_value_heads: 4, vocab_size: 262208 },
	},
	maxPositionEmbeddings: 131072,
	headDim,
	activation: "geglu",
	activationField: { hidden_activation: "gelu_pytorch_tanh" },
	defaults: { rope_theta: 1e6, tie_word_embeddings: true },
	positions: (values, bad) => ({
		...values,
		rope_parameters: newerPositions(values, "full_attention", bad),
	}),
	only: {
		...{ attention_bias: false, use_bidirectional_attention: false },
		...{ attn_logit_softcapping: null, final_logit_softcapping: null },
	},
	read: (values, bad, layers) => {
		const hidden = whole(values, "hidden_size", hiddenSize, bad);
		// transformers refuses others, though heads of any size could be computed.
		if (hidden % whole(values, "num_attention_heads", heads, bad) !== 0) {
			bad(`hidden_size is ${hidden}, no multiple of num_attention_heads`);
		}
		const period = whole(
			values,
			values._sliding_window_pattern ? "_sliding_window_pattern" : "sliding_window_pattern",
			6,
			bad,
		);
		const windows = readWindows(values, bad, layers, {
			size: whole(values, "sliding_window", 4096, bad),
			rule: (layer) => (layer + 1) % period !== 0,
		});
		const scalar = fraction(values, "query_pre_attn_scalar", 256, bad);
		return {
			...{ applyLayernorm1p: true, qkLayernorm: true, postLayernorm: true },
			embeddingMultiplier: Math.sqrt(hidden),
			softmaxScale: scalar === (values.head_dim ?? headDim) ? null : 1 / Math.sqrt(scalar),
			...(values.pad_token_id === undefined && { embeddingPaddingIdx: 0 }),
			rotaryBaseLocal: windows.windowSize === null ? null : readLocalBase(values, bad),
			...windows,
		};
	},
	write: (c) => ({
		query_pre_attn_scalar: queryScalar(c),
		rope_local_base_freq: pythonFloat(c.rotaryBaseLocal ?? localBase),
		...writtenWindows(c),
		sliding_window: keysOfWindow(c.windowSize) ?? 4096,
	}),
	describes: ({ postLayernorm }) => postLayernorm === true,
});

/** The rotary embeddings of a kind of layers in the form of transformers 5; null: config.json has the form of 4. */
function newerPositions({ rope_parameters: kinds }: Json, kind: string, bad: Refuse): Json | null {
	if (typeof kinds !== "object" || kinds === null) return null;
	const own = (kinds as Json)[kind];
	if (typeof own === "object" && own !== null) return own as Json;
	return bad(`rope_parameters has no ${kind}`);
}

/** Of layers with a window; rope_scaling of the older form is of the others. */
function readLocalBase(values: Json, bad: Refuse): number {
	const newer = newerPositions(values, "sliding_attention", bad);
	const type = newer?.rope_type ?? "default";
	if (type !== "default") bad(`rope_type of sliding_attention is ${JSON.stringify(type)}; "default" can be read`);
	return newer
		? fraction(newer, "rope_theta", localBase, bad)
		: fraction(values, "rope_local_base_freq", localBase, bad);
}

/** query_pre_attn_scalar, a whole number where the scale of scores is of one. */
function queryScalar({ softmaxScale, kvChannels }: LanguageModelConfiguration): unknown {
	if (softmaxScale == null) return kvChannels;
	const scalar = Math.round(softmaxScale ** -2);
	return 1 / Math.sqrt(scalar) === softmaxScale ? scalar : pythonFloat(softmaxScale ** -2);
}
