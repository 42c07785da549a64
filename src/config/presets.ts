/**
 * Known models (docs/spec/language-model.md §9.1) and their recipes as far as they were published. Layout is never part
 * of a preset: one process is the default.
 */
import { decoderPresets, recipe } from "./decoder-presets.ts";
import { type PresetName, presetNames } from "./keys/run.ts";
import type { Key } from "./schema.ts";

type Preset = Readonly<Partial<Record<Key, unknown>>>;

/** DeepSeek's router, which Nemotron has too. */
const biasedRouter: Preset = {
	"moe-router-score-function": "sigmoid",
	"moe-router-topk-scaling-factor": 2.5,
	"moe-router-enable-expert-bias": true,
	"moe-router-load-balancing-type": ["seq_aux_loss"],
	"moe-aux-loss-coeff": [1e-4],
};

/** Values that the 20L, 54L and Nano models share. */
const nemotron: Preset = {
	"hidden-size": 2688,
	"vocab-size": 131072,
	"num-attention-heads": 32,
	"num-query-groups": 8,
	"kv-channels": 128,
	"ffn-hidden-size": 1856,
	"squared-relu": true,
	"init-method-std": 0.0173,
	"norm-epsilon": 1e-5,
	"mamba-num-heads": 64,
	"mamba-head-dim": 64,
	"mamba-num-groups": 8,
	"mamba-state-dim": 128,
	"num-experts": 128,
	"moe-router-topk": 6,
	"moe-ffn-hidden-size": 1856,
	"moe-shared-expert-intermediate-size": 3712,
	...biasedRouter,
	...recipe,
};

/** The published 20-layer recipe, which the 54-layer model differs from in its pattern alone. */
const mimoRecipe: Preset = {
	"global-batch-size": 8,
	"train-iters": 20,
	lr: 2e-4,
	"min-lr": 2e-6,
	"lr-decay-style": "cosine",
	"lr-decay-iters": 10,
	"weight-decay": 0.05,
};

/** The vision encoder and projector of the published MIMO recipes: RADIO-H, and an MLP behind a norm. */
const vision: Preset = {
	"model-provider": "nemotron-moe-vlm",
	"pixel-shuffle": true,
	"disable-vision-class-token": true,
	"dynamic-resolution": true,
	"img-h": 512,
	"img-w": 512,
	"vision-projection-type": "mlp",
	"vision-projection-norm": true,
};

/**
 * Values that the Nemotron VLM branch's loop gives a model provider: its stage 2 (the tower frozen), gradients of the encoder corrected
 * for ranks without images, attention recomputed.
 */
const providerOfLoop: Preset = {
	...vision,
	"freeze-vit": true,
	"encoder-grad-participation": "corrected",
	"cross-entropy-loss-fusion": true,
	"use-distributed-optimizer": true,
	"recompute-granularity": "selective",
	"recompute-modules": ["core_attn"],
};

/** Nemotron Nano v2 12B, as its config.json and Megatron-Bridge have it: dense, 62 layers. */
const nano12: Preset = {
	"hybrid-layer-pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
	"hidden-size": 5120,
	"vocab-size": 131072,
	"num-attention-heads": 40,
	"num-query-groups": 8,
	"kv-channels": 128,
	"ffn-hidden-size": 20480,
	"squared-relu": true,
	"init-method-std": 0.0125,
	"norm-epsilon": 1e-5,
	"mamba-num-heads": 128,
	"mamba-head-dim": 80,
	"mamba-num-groups": 8,
	"mamba-state-dim": 128,
	...recipe,
};

const nano30: Preset = {
	...nemotron,
	"hybrid-layer-pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
	"num-query-groups": 2,
	lr: 1.6e-3,
	"min-lr": 1.6e-5,
	"weight-decay": 0.1,
};

/** Differences between the sizes of Gemma 3. */
interface GemmaSizes {
	readonly layers: number;
	readonly hidden: number;
	readonly ffn: number;
	readonly heads: number;
	readonly groups: number;
	readonly window: number;
}

/** A language model of Gemma 3, as its config.json has it; every sixth layer sees all tokens. */
function gemma3({ layers, hidden, ffn, heads, groups, window }: GemmaSizes): Preset {
	return {
		"hybrid-layer-pattern": "*-".repeat(layers),
		"hidden-size": hidden,
		"ffn-hidden-size": ffn,
		"num-attention-heads": heads,
		"num-query-groups": groups,
		"kv-channels": 256,
		"window-size": [window - 1, 0],
		"window-attn-skip-freq": Array.from({ length: 2 * layers }, (_, at) => Number(Math.floor(at / 2) % 6 !== 5)),
		"position-embedding-type": "rope",
		"rotary-base": 1e6,
		"rotary-base-local": 1e4,
		"rotary-seq-len-interpolation-factor": 8,
		"max-position-embeddings": 131072,
		"vocab-size": 262208,
		"embedding-multiplier": Math.sqrt(hidden),
		"embedding-padding-idx": 0,
		"untie-embeddings-and-output-weights": false,
		"norm-epsilon": 1e-6,
		"apply-layernorm-1p": true,
		"qk-layernorm": true,
		"post-layernorm": true,
		geglu: true,
		...recipe,
	};
}

/** What Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B share; every fourth layer has attention. */
function qwenOfExperts({ layers, ...sizes }: { readonly layers: number } & Preset): Preset {
	return {
		"hybrid-layer-pattern": "GEGEGE*E".repeat(layers / 4),
		"hidden-size": 2048,
		"num-attention-heads": 16,
		"num-query-groups": 2,
		"kv-channels": 256,
		"position-embedding-type": "rope",
		"rotary-base": 1e7,
		"rotary-percent": 0.25,
		"max-position-embeddings": 262144,
		"norm-epsilon": 1e-6,
		"apply-layernorm-1p": true,
		"qk-layernorm": true,
		"attention-output-gate": true,
		swiglu: true,
		"moe-ffn-hidden-size": 512,
		"moe-shared-expert-intermediate-size": 512,
		"moe-shared-expert-gate": true,
		"moe-router-score-function": "softmax",
		"moe-router-load-balancing-type": ["aux_loss"],
		"moe-aux-loss-coeff": [1e-3],
		...sizes,
		...recipe,
	};
}

/** An elastic parent whose budgets are shares of all its parameters. */
const elastic: Preset = { flextron: true, "enable-router": true, "param-budget-target": "total" };

/** gpt-oss of so many layers, as its config.json and Megatron-Bridge have it. */
function gptOss(layers: number, experts: number): Preset {
	return {
		"hybrid-layer-pattern": "*E".repeat(layers),
		"hidden-size": 2880,
		"vocab-size": 201088,
		"num-attention-heads": 64,
		"num-query-groups": 8,
		"kv-channels": 64,
		"window-size": [127, 0],
		// Every second layer of attention; each layer is two of the pattern.
		"window-attn-skip-freq": Array.from({ length: 2 * layers }, (_, index) => (index % 4 < 2 ? 1 : 0)),
		"softmax-type": "learnable",
		"position-embedding-type": "yarn",
		"rotary-base": 150000,
		"rotary-scaling-factor": 32,
		"yarn-correction-range-round-to-int": false,
		"ffn-hidden-size": 2880,
		"quick-geglu": true,
		"glu-linear-offset": 1,
		"activation-func-clamp-value": 7,
		"add-bias-linear": true,
		"norm-epsilon": 1e-5,
		"num-experts": experts,
		"moe-router-topk": 4,
		...recipe,
	};
}

/** What DeepSeek-V3 and Moonlight share. */
const deepseek: Preset = {
	"qk-layernorm": true,
	"latent-norm-epsilon": 1e-6,
	"init-method-std": 0.02,
	swiglu: true,
	...biasedRouter,
	...recipe,
};

/** Options of all models that train in a minute or two on two CPU cores. */
const tiny: Preset = {
	...biasedRouter,
	"num-attention-heads": 4,
	"num-query-groups": 2,
	"squared-relu": true,
	"mamba-num-groups": 2,
	"mamba-chunk-size": 64,
	"num-experts": 8,
	"moe-router-topk": 2,
	"micro-batch-size": 4,
	lr: 3e-3,
	"lr-decay-style": "cosine",
	"adam-beta2": 0.95,
	"log-interval": 10,
};

export const presets: Readonly<Record<PresetName, Preset>> = {
	// Every layer kind, bytes as tokens: trains in about a minute on two CPU cores.
	"nemotron-tiny": {
		...tiny,
		"hybrid-layer-pattern": "ME*-MEM",
		"hidden-size": 128,
		"vocab-size": 256,
		"kv-channels": 32,
		"ffn-hidden-size": 256,
		"init-method-std": 0.05,
		"mamba-num-heads": 8,
		"mamba-head-dim": 32,
		"mamba-state-dim": 32,
		"moe-ffn-hidden-size": 128,
		"moe-shared-expert-intermediate-size": 128,
		"seq-length": 256,
		"global-batch-size": 8,
		"train-iters": 300,
		"min-lr": 3e-4,
		"lr-warmup-fraction": 20 / 300,
		"weight-decay": 0.1,
	},
	// nemotron-tiny with a small RADIO tower; tokens are bytes, and the image token above them.
	"nemotron-vlm-tiny": {
		...tiny,
		"model-provider": "nemotron-moe-vlm",
		"hybrid-layer-pattern": "ME*-ME",
		"hidden-size": 64,
		"vocab-size": 512,
		"kv-channels": 16,
		"ffn-hidden-size": 128,
		"init-method-std": 0.1,
		"mamba-num-heads": 4,
		"mamba-head-dim": 32,
		"mamba-state-dim": 16,
		"moe-ffn-hidden-size": 64,
		"moe-shared-expert-intermediate-size": 64,
		"vision-num-layers": 3,
		"vision-hidden-size": 64,
		"vision-num-attention-heads": 4,
		"vision-max-img-h": 160,
		"vision-max-img-w": 160,
		"patch-dim": 8,
		"class-token-len": 4,
		"pixel-shuffle": true,
		"disable-vision-class-token": true,
		"dynamic-resolution": true,
		"image-token-id": 511,
		"seq-length": 64,
		"global-batch-size": 16,
		"train-iters": 100,
		"min-lr": 2e-4,
		"lr-warmup-fraction": 10 / 100,
		"weight-decay": 0.05,
	},
	"nemotron-20l": { ...nemotron, ...mimoRecipe, "hybrid-layer-pattern": "MEMEM*EMEMEM*EMEMEM*" },
	"nemotron-54l": {
		...nemotron,
		...mimoRecipe,
		"hybrid-layer-pattern": "MEMEM*EMEM*EMEM*EMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEME",
	},
	"nemotron-moe-vlm-20l": { ...nemotron, ...providerOfLoop, "hybrid-layer-pattern": "MEMEM*EMEMEM*EMEMEM*" },
	"nemotron-moe-vlm-54l": {
		...nemotron,
		...providerOfLoop,
		"hybrid-layer-pattern": "MEMEM*EMEM*EMEM*EMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEME",
	},
	"nemotron-nano-30b-a3b": nano30,
	"nemotron-nano-12b-v2": nano12,
	// Nested models of 12, 9 and 6 billion parameters.
	"nemotron-elastic-12b": {
		...nano12,
		...elastic,
		"emb-int-list": [5120, 4480, 3840, 3072],
		"mamba-int-list": [128, 112, 96, 64],
		"head-int-list": [40, 32, 24],
		"budget-list": [1, 0.75, 0.5],
	},
	// Nested models of 30, 23 and 12 billion parameters.
	"gpt-oss-20b": gptOss(24, 32),
	"gpt-oss-120b": gptOss(36, 128),
	"nemotron-elastic-30b-a3b": {
		...nano30,
		...elastic,
		"emb-int-list": [2688, 2304, 1920],
		"mamba-int-list": [64, 56, 48],
		"mlp-int-list": [1856, 1536, 1024],
		"moe-expert-int-list": [128, 112, 96, 64],
		"budget-list": [1, 0.73, 0.38],
	},
	...decoderPresets,
	"qwen3-next-80b-a3b": qwenOfExperts({
		layers: 48,
		...{ "vocab-size": 151936, "ffn-hidden-size": 5120, "num-experts": 512, "moe-router-topk": 10 },
	}),
	// Qwen3.6-35B-A3B has the same sizes.
	"qwen3.5-35b-a3b": qwenOfExperts({
		layers: 40,
		...{ "vocab-size": 248320, "num-experts": 256, "moe-router-topk": 8 },
	}),
	"gemma-3-1b": {
		...gemma3({ layers: 26, hidden: 1152, ffn: 6912, heads: 4, groups: 1, window: 512 }),
		...{ "vocab-size": 262144, "max-position-embeddings": 32768, "rotary-seq-len-interpolation-factor": null },
	},
	"gemma-3-4b": gemma3({ layers: 34, hidden: 2560, ffn: 10240, heads: 8, groups: 4, window: 1024 }),
	"gemma-3-12b": gemma3({ layers: 48, hidden: 3840, ffn: 15360, heads: 16, groups: 8, window: 1024 }),
	"gemma-3-27b": {
		...gemma3({ layers: 62, hidden: 5376, ffn: 21504, heads: 32, groups: 16, window: 1024 }),
		...{ "kv-channels": 128, "softmax-scale": 1 / Math.sqrt(168) },
	},
	"deepseek-v3": {
		...deepseek,
		"hybrid-layer-pattern": `${"+-".repeat(3)}${"+E".repeat(58)}/+E`,
		"hidden-size": 7168,
		"ffn-hidden-size": 18432,
		"num-attention-heads": 128,
		"q-lora-rank": 1536,
		"norm-epsilon": 1e-6,
		"rotary-base": 10000,
		"rotary-scaling-factor": 40,
		"yarn-original-max-position-embeddings": 4096,
		mscale: 1,
		"mscale-all-dim": 1,
		"max-position-embeddings": 163840,
		"vocab-size": 129280,
		"num-experts": 256,
		"moe-router-topk": 8,
		"moe-ffn-hidden-size": 2048,
		"moe-shared-expert-intermediate-size": 2048,
		"moe-router-num-groups": 8,
		"moe-router-group-topk": 4,
	},
	// The same blocks at other sizes, positions without scaling.
	"moonlight-16b-a3b": {
		...deepseek,
		"hybrid-layer-pattern": `+-${"+E".repeat(26)}`,
		"hidden-size": 2048,
		"ffn-hidden-size": 11264,
		"num-attention-heads": 16,
		"norm-epsilon": 1e-5,
		"rope-type": "rope",
		"rotary-base": 50000,
		"max-position-embeddings": 8192,
		"vocab-size": 163840,
		"num-experts": 64,
		"moe-router-topk": 6,
		"moe-ffn-hidden-size": 1408,
		"moe-shared-expert-intermediate-size": 2816,
		"moe-router-topk-scaling-factor": 2.446,
		"moe-aux-loss-coeff": [1e-3],
	},
};

/** Keys for one setting in different units: a given key replaces the preset's keys of its group. */
const alternatives: readonly (readonly Key[])[] = [
	["train-iters", "train-samples", "train-epochs"],
	["lr-decay-iters", "lr-decay-samples"],
	["lr-warmup-fraction", "lr-warmup-iters", "lr-warmup-samples"],
];

/** The preset's values, without keys that `given` replaces in another unit. */
export function presetValues(name: PresetName, given: ReadonlySet<Key>): (readonly [Key, unknown])[] {
	const isReplaced = (key: Key) =>
		alternatives.some((keys) => keys.includes(key) && keys.some((other) => given.has(other)));
	return (Object.entries(presets[name]) as [Key, unknown][]).filter(([key]) => !isReplaced(key));
}

export function isPresetName(name: unknown): name is PresetName {
	return (presetNames as readonly unknown[]).includes(name);
}
