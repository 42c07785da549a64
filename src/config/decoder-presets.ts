/** Sizes of published decoders: attention with rotary embeddings and SwiGLU, as their config.json have them. */
import type { Key } from "./schema.ts";

type Values = Readonly<Partial<Record<Key, unknown>>>;

/** How the published recipes of Nemotron train; presets of other models do the same. */
export const recipe: Values = {
	"seq-length": 8192,
	"micro-batch-size": 1,
	bf16: true,
	"adam-beta1": 0.9,
	"adam-beta2": 0.95,
	"clip-grad": 1,
};

interface Sizes {
	readonly layers: number;
	readonly hidden: number;
	/** Channels of a dense layer's SwiGLU. */
	readonly ffn: number;
	readonly heads: number;
	readonly groups: number;
	/** Columns of a head; default: 128. */
	readonly head?: number;
	readonly vocabulary: number;
	readonly positions: number;
	readonly rotaryBase: number;
	/** Keys that the families below add. */
	readonly more?: Values;
}

function decoder({
	layers,
	hidden,
	ffn,
	heads,
	groups,
	head = 128,
	vocabulary,
	positions,
	rotaryBase,
	more,
}: Sizes): Values {
	return {
		"hybrid-layer-pattern": "*-".repeat(layers),
		"hidden-size": hidden,
		"ffn-hidden-size": ffn,
		"num-attention-heads": heads,
		"num-query-groups": groups,
		"kv-channels": head,
		"position-embedding-type": "rope",
		"rotary-base": rotaryBase,
		"max-position-embeddings": positions,
		"vocab-size": vocabulary,
		"init-method-std": 0.02,
		swiglu: true,
		...recipe,
		...more,
	};
}

const tied: Values = { "untie-embeddings-and-output-weights": false };

type Family = Omit<Sizes, "vocabulary" | "positions" | "rotaryBase">;

/** Llama 3.1 and 3.2: rotary frequencies scaled by `factor`. */
const llama3 = (factor: number, { more, ...sizes }: Family) =>
	decoder({
		...{ ...sizes, vocabulary: 128256, positions: 131072, rotaryBase: 5e5 },
		more: { "norm-epsilon": 1e-5, "use-rope-scaling": true, "rope-scaling-factor": factor, ...more },
	});

/** Qwen3: norms of queries and keys. */
const qwen3 = ({ more, ...sizes }: Family) =>
	decoder({
		...{ ...sizes, vocabulary: 151936, positions: 40960, rotaryBase: 1e6 },
		more: { "norm-epsilon": 1e-6, "qk-layernorm": true, ...more },
	});

/** Qwen3 with experts in every layer: 8 of 128. */
const qwen3Experts = (width: number, sizes: Family) =>
	qwen3({
		...sizes,
		more: {
			"hybrid-layer-pattern": "*E".repeat(sizes.layers),
			"num-experts": 128,
			"moe-router-topk": 8,
			"moe-ffn-hidden-size": width,
			"moe-router-score-function": "softmax",
			"moe-router-load-balancing-type": ["aux_loss"],
			"moe-aux-loss-coeff": [1e-3],
		},
	});

export const decoderPresets = {
	"llama-3.2-1b": llama3(32, { layers: 16, hidden: 2048, ffn: 8192, heads: 32, groups: 8, head: 64, more: tied }),
	"llama-3.1-8b": llama3(8, { layers: 32, hidden: 4096, ffn: 14336, heads: 32, groups: 8 }),
	"llama-3.1-70b": llama3(8, { layers: 80, hidden: 8192, ffn: 28672, heads: 64, groups: 8 }),
	"mistral-7b-v0.3": decoder({
		...{
			layers: 32,
			hidden: 4096,
			ffn: 14336,
			heads: 32,
			groups: 8,
			vocabulary: 32768,
			positions: 32768,
			rotaryBase: 1e6,
		},
		more: { "norm-epsilon": 1e-5 },
	}),
	"qwen2.5-7b": decoder({
		...{
			layers: 28,
			hidden: 3584,
			ffn: 18944,
			heads: 28,
			groups: 4,
			vocabulary: 152064,
			positions: 131072,
			rotaryBase: 1e6,
		},
		more: { "norm-epsilon": 1e-6, "add-qkv-bias": true },
	}),
	"qwen3-0.6b": qwen3({ layers: 28, hidden: 1024, ffn: 3072, heads: 16, groups: 8, more: tied }),
	"qwen3-8b": qwen3({ layers: 36, hidden: 4096, ffn: 12288, heads: 32, groups: 8 }),
	"qwen3-32b": qwen3({ layers: 64, hidden: 5120, ffn: 25600, heads: 64, groups: 8 }),
	"qwen3-30b-a3b": qwen3Experts(768, { layers: 48, hidden: 2048, ffn: 6144, heads: 32, groups: 4 }),
	"qwen3-235b-a22b": qwen3Experts(1536, { layers: 94, hidden: 4096, ffn: 12288, heads: 64, groups: 4 }),
} as const;
