/**
 * The language model: depth, width, attention, activation, initialisation (docs/spec/language-model.md §1, §3, §6, §9).
 */
import { type ActivationFlag, flaggedActivations } from "../../native/activations.ts";
import {
	alwaysOn,
	boolean,
	choice,
	defaulting,
	derived,
	fraction,
	integer,
	list,
	number,
	off,
	optional,
	positiveNumber,
	required,
	text,
} from "../field.ts";
import {
	defaultRecomputeModules,
	foreignRecomputeModules,
	type RecomputeModule,
	recomputeModuleNames,
	recomputeModules,
} from "../recompute-modules.ts";

/** YaRN's scaling of rotary embeddings, with Megatron's defaults (docs/spec/families.md §2.2). */
export const yarnKeys = {
	"rotary-scaling-factor": defaulting(positiveNumber, 1, "Divisor of YaRN's low frequencies.", { model: "YaRN" }),
	"yarn-original-max-position-embeddings": defaulting(
		integer(1),
		4096,
		"Longest sequence of the pretraining before YaRN.",
		{ model: "YaRN" },
	),
	"yarn-beta-fast": defaulting(
		positiveNumber,
		32,
		"Turns within yarn-original-max-position-embeddings from which on a frequency stays as it is.",
		{ model: "YaRN" },
	),
	"yarn-beta-slow": defaulting(positiveNumber, 1, "Turns up to which a frequency is divided.", { model: "YaRN" }),
	"yarn-correction-range-round-to-int": defaulting(
		boolean,
		true,
		"The range of frequencies between yarn-beta-fast and yarn-beta-slow ends at whole indices.",
		{ model: "YaRN" },
	),
	mscale: defaulting(
		number(0),
		1,
		"YaRN's cosines and sines are multiplied by M(mscale) / M(mscale-all-dim), M(a) = 0.1 a ln(rotary-scaling-factor) + 1.",
		{ model: "YaRN" },
	),
	"mscale-all-dim": defaulting(number(0), 0, "The divisor of this factor; 0: 1.", { model: "YaRN" }),
	"yarn-attention-factor": optional(positiveNumber, "This factor itself; unset: of mscale and mscale-all-dim.", {
		model: "YaRN",
	}),
} as const;

export const modelKeys = {
	"model-provider": defaulting(
		choice(["hybrid", "nemotron-moe-vlm"]),
		"hybrid",
		"hybrid: the language model alone; nemotron-moe-vlm: with a RADIO vision encoder and a projector.",
		{ told: false, megatron: "nemotron-moe-vlm" },
	),
	"hybrid-layer-pattern": required(
		text,
		"One symbol a layer: M Mamba-2, * attention, + multi-latent attention, - dense MLP, E mixture of experts; | between pipeline segments, [ ] around layers that are one block, / before each multi-token prediction (MTP) depth.",
		{ aliases: ["hybrid-override-pattern"] },
	),
	"mtp-num-layers": derived(
		integer(0),
		"parts after / in hybrid-layer-pattern",
		"Depths of multi-token prediction (MTP); the pattern wins. 0 with load-hf: those of the folder are left out.",
		{
			model: false,
		},
	),
	"mtp-loss-scaling-factor": defaulting(
		number(0),
		0.1,
		"Weight of all multi-token prediction losses together beside the language model's.",
		{ model: false },
	),
	"mtp-use-repeated-layer": off("Every MTP depth runs the first one's parameters."),
	"num-layers": derived(integer(1), "symbols of hybrid-layer-pattern", "Number of layers; the pattern wins.", {
		told: true,
		model: false,
	}),
	"hidden-size": required(integer(1), "Width of the residual stream.", { place: "hiddenSize" }),
	"ffn-hidden-size": derived(integer(1), "4 × hidden-size", "Width of a dense MLP layer (-).", {
		place: "mlp.ffnHiddenSize",
		model: "dense MLP",
	}),
	"num-attention-heads": derived(
		integer(1),
		"1 when the pattern has no * and no +; required otherwise",
		"Query heads of an attention layer.",
		{ place: "attention.heads", model: "attention heads" },
	),
	"num-attention-heads-per-layer": optional(
		list(integer(1)),
		"Query heads of every * of the pattern's main part in order, where they differ; unset: num-attention-heads each.",
		{ model: "attention" },
	),
	"group-query-attention": alwaysOn("Grouped-query attention; num-query-groups alone decides here."),
	"num-query-groups": derived(integer(1), "num-attention-heads", "Key and value heads of an attention layer.", {
		place: "attention.queryGroups",
		model: "attention",
	}),
	"kv-channels": derived(integer(1), "hidden-size / num-attention-heads", "Width of one attention head.", {
		place: "attention.headDim",
		model: "attention",
	}),
	"window-size": optional(
		list(integer(0)),
		"Keys before a query that attention sees and, after it, 0: `127 0` for a window of 128 with the query's own. Unset: all.",
		{ model: "attention" },
	),
	"window-attn-skip-freq": optional(
		list(integer(0)),
		"Layers without the window: every n-th of the pattern, or a list with 1 (window) or 0 for each of its layers. Unset: none.",
		{ model: "attention" },
	),
	"softmax-scale": optional(positiveNumber, "Factor of attention scores. Unset: 1 / √kv-channels.", {
		model: "attention",
	}),
	"softmax-type": defaulting(
		choice(["vanilla", "learnable"], ["off-by-one"]),
		"vanilla",
		"Softmax of attention; learnable: a logit of each head, an attention sink, joins its denominators.",
		{ model: "attention" },
	),
	"qk-layernorm": off(
		"RMSNorm of every query head and every key head, before rotary embeddings; in multi-latent attention, of the latents.",
		{ place: "attention.qkNorm", model: "attention heads" },
	),
	"attention-output-gate": off(
		"A sigmoid of a further projection weighs the output of attention, channel by channel.",
		{ place: "attention.outputGate", model: "attention" },
	),
	...(Object.fromEntries(flaggedActivations.map(([, { flag, help }]) => [flag, off(help, { model: "MLP" })])) as Record<
		ActivationFlag,
		ReturnType<typeof off>
	>),
	"activation-func-clamp-value": optional(
		positiveNumber,
		"Gated activations: the gate is at most this, the linear half between minus this and this. Unset: no clamp.",
		{ model: "MLP" },
	),
	"glu-linear-offset": defaulting(number(), 0, "Added to the linear half of quick-geglu.", {
		place: "mlp.linearOffset",
		model: "MLP",
	}),
	"add-bias-linear": off("Biases in attention projections, MLPs, experts and routers of the language model.", {
		megatron: "true",
	}),
	"add-qkv-bias": off("Biases in the query, key and value projections of attention.", { model: "attention" }),
	"add-attention-bias": off("Biases in all projections of attention.", { model: "attention" }),
	"disable-bias-linear": off("Linear layers of the language model without bias.", {
		noEffect: "biases come with add-bias-linear alone",
	}),
	normalization: defaulting(choice(["RMSNorm", "LayerNorm"]), "RMSNorm", "Norm of the language model.", {
		place: "normalization",
		megatron: "LayerNorm",
	}),
	"apply-layernorm-1p": off("Norms multiply by 1 + weight, which is 0 at first; RMSNorm alone.", {
		place: "zeroCentredNorms",
	}),
	"post-layernorm": off(
		"A norm behind every attention and MLP layer, before its output is added to the residual stream.",
		{ place: "postNorms" },
	),
	"norm-epsilon": defaulting(positiveNumber, 1e-5, "Added to the mean square inside a norm.", {
		place: "normEpsilon",
		argument: "layernorm_epsilon",
	}),
	"init-method-std": defaulting(number(0), 0.02, "Standard deviation of initial weights.", {
		told: true,
		place: "initMethodStd",
		model: false,
	}),
	"embedding-init-method-std": derived(
		number(0),
		"init-method-std",
		"Standard deviation of the initial word embedding.",
		{ place: "embeddingInitMethodStd", model: false },
	),
	"embedding-multiplier": defaulting(positiveNumber, 1, "Factor of the word embedding, as √hidden-size in Gemma."),
	"embedding-padding-idx": optional(
		integer(0),
		"Token whose row of the word embedding gets no gradient, a config.json's pad_token_id. Unset: none.",
		{ told: true, place: "embedding.paddingId", model: false },
	),
	"position-embedding-type": defaulting(
		choice(["none", "rope", "yarn", "learned_absolute"], ["mrope", "relative"]),
		"none",
		"Position embedding of the language model; yarn: rotary embeddings scaled by YaRN; learned_absolute: a table that is added to the word embedding.",
		{ model: "positions", megatron: "learned_absolute" },
	),
	"rotary-base": defaulting(positiveNumber, 10000, "Base of rotary position embeddings.", {
		model: "rotary embedding",
	}),
	"rotary-base-local": optional(
		positiveNumber,
		"Base of rotary position embeddings in layers with a window, whose frequencies are not scaled. Unset: rotary-base, scaled.",
		{ place: "attention.localRopeBase", model: "rotary embedding" },
	),
	"rotary-interleaved": derived(
		boolean,
		"true when the pattern has +",
		"Rotary embeddings turn pairs of neighbouring channels, instead of channels half of the rotated ones apart.",
		{ model: "rotary embedding", megatron: "false, and + turns neighbours" },
	),
	"mrope-section": optional(
		list(integer(0)),
		"Multimodal rotary embedding: how many of a head's frequencies turn by time, row and column of pictures' tokens; unset: all by the place in the sequence.",
		{ place: "attention.mropeSection", model: "rotary embedding" },
	),
	"mrope-interleaved": off(
		"The three axes of mrope-section take turns, as in Qwen3-VL, instead of running one after another.",
		{
			place: "attention.mropeInterleaved",
			model: "rotary embedding",
		},
	),
	"rotary-percent": defaulting(number(0, 1), 1, "Share of a head's channels that rotary embeddings turn.", {
		model: "rotary embedding",
	}),
	"use-rope-scaling": off("Llama 3's scaling of rotary embeddings for sequences beyond those of the pretraining.", {
		model: "rotary embedding",
	}),
	"rope-scaling-factor": defaulting(positiveNumber, 8, "Divisor of rotary embeddings' low frequencies.", {
		model: "rotary embedding",
	}),
	"rope-scaling-low-freq-factor": defaulting(
		positiveNumber,
		1,
		"Turns within rope-scaling-original-max-position-embeddings up to which a frequency is divided.",
		{ model: "rotary embedding" },
	),
	"rope-scaling-high-freq-factor": defaulting(positiveNumber, 4, "Turns from which on a frequency stays as it is.", {
		model: "rotary embedding",
	}),
	"rope-scaling-original-max-position-embeddings": defaulting(
		integer(1),
		8192,
		"Longest sequence of the pretraining without scaling.",
		{ model: "rotary embedding" },
	),
	"rotary-seq-len-interpolation-factor": optional(
		positiveNumber,
		"Divisor of all frequencies of rotary embeddings. Unset: 1.",
		{ model: "rotary embedding" },
	),
	...yarnKeys,
	"attention-backend": defaulting(
		choice(["auto", "flash", "fused", "unfused", "local"]),
		"auto",
		"Megatron's choice of attention kernel.",
		{ noEffect: "each native library chooses its attention kernel" },
	),
	"attention-softmax-in-fp32": alwaysOn("Softmax of attention in fp32."),
	"use-mcore-models": alwaysOn("Models of Megatron Core, which these are."),
	"transformer-impl": defaulting(
		choice(["transformer_engine", "local", "inference_optimized"]),
		"transformer_engine",
		"Megatron's choice of layers.",
		{ noEffect: "every layer kind has one implementation" },
	),
	"vocab-size": required(integer(1), "Tokens of the vocabulary before padding.", { place: "vocabularySize" }),
	"make-vocab-size-divisible-by": defaulting(
		integer(1),
		128,
		"Embedding rows are padded to a multiple of this, which llm-tp has to divide; padding rows never enter the softmax.",
		{ model: false },
	),
	"untie-embeddings-and-output-weights": defaulting(boolean, true, "Output layer with weights of its own.", {
		megatron: "false",
	}),
	"seq-length": defaulting(
		integer(1),
		2048,
		"Tokens of a training sequence; a folder of load-hf makes it at most its max_position_embeddings.",
		{ model: false },
	),
	"max-position-embeddings": derived(integer(1), "seq-length", "Upper bound of seq-length; rows of learned_absolute.", {
		model: "learned positions",
	}),
	"hidden-dropout": defaulting(fraction, 0, "Dropout of embeddings and of every layer's output.", {
		told: true,
		place: "hiddenDropout",
		model: false,
		megatron: "0.1",
	}),
	"attention-dropout": defaulting(fraction, 0, "Dropout of attention probabilities.", {
		told: true,
		place: "attention.dropout",
		model: false,
		megatron: "0.1",
	}),
	"recompute-granularity": optional(
		choice(["full", "selective"]),
		"Compute activations of the language model again in the backward pass instead of keeping them: full, those of whole layers; selective, those of recompute-modules.",
		{ model: false },
	),
	"recompute-modules": optional(
		list<RecomputeModule>(choice(recomputeModuleNames, foreignRecomputeModules)),
		`Modules whose results recompute-granularity selective does not keep; unset: ${defaultRecomputeModules.join(" ")}. ${recomputeModuleNames
			.map((name) => `${name}: ${recomputeModules[name].dropped}`)
			.join("; ")}.`,
		{ model: false },
	),
	"recompute-method": defaulting(
		choice(["uniform", "block"]),
		"uniform",
		"uniform: every layer in runs of recompute-num-layers; block: only the first recompute-num-layers layers.",
		{ model: false, megatron: "unset" },
	),
	"recompute-num-layers": defaulting(integer(1), 1, "Layers of one recomputed run, or recomputed layers.", {
		model: false,
		megatron: "unset",
	}),
} as const;
