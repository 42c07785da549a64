/** Shape and options of the hybrid Mamba-2 / attention / MLP / MoE language model (docs/spec/language-model.md §9). */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { At } from "../../config/language-model.ts";
import type { OffloadModule, RecomputeModule } from "../../config/recompute-modules.ts";
import type { ActivationName, MlpRecipeName, ScoreFunctionName } from "../../native/abi.ts";
import type { LoraConfig } from "../lora.ts";

export interface BalancingLoss {
	/** pooled_aux_loss is transformers' (pooled-balancing.ts), the others are Megatron's. */
	readonly type: "seq_aux_loss" | "aux_loss" | "global_aux_loss" | "pooled_aux_loss";
	readonly coefficient: number;
}

/** Multi-token prediction (docs/spec/language-model.md §5.4). */
export interface MtpConfig {
	/** Number of depths: further tokens that are predicted. */
	readonly depths: number;
	/** Symbol of every layer of a depth. */
	readonly pattern: readonly LayerKind[];
	/** Whether every depth uses the parameters of the first. */
	readonly repeated: boolean;
	/** Weight of the sum of all depths' losses beside the language model loss. */
	readonly lossScalingFactor: number;
}

/**
 * --recompute-granularity full. uniform: every block is recomputed, in runs of `layers`, of which only the first input is kept.
 * block: only the first `layers` blocks of a stage are recomputed, one by one.
 */
export interface FullRecompute {
	readonly granularity: "full";
	readonly method: "uniform" | "block";
	readonly layers: number;
}

/** --recompute-granularity selective: parts of each layer. */
export interface SelectiveRecompute {
	readonly granularity: "selective";
	readonly modules: readonly RecomputeModule[];
}

/** Which projections have biases: none, those of queries, keys and values, all of attention, or all of attention, MLPs, experts and routers. */
export interface Biases {
	readonly of: "none" | "qkv" | "attention" | "all";
	/** Initial values: `mimo verify` draws them, so that they affect every gradient. */
	readonly start: "zero" | "drawn";
}

/** Scaling of rotary frequencies for sequences beyond those of the pretraining (docs/spec/families.md §2.2). */
export type RopeScaling =
	| { readonly type: "linear"; readonly factor: number }
	| {
			readonly type: "llama3" | "yarn";
			readonly factor: number;
			/** Turns in the original context up to which a frequency is divided, and from which on it stays. */
			readonly lowTurns: number;
			readonly highTurns: number;
			readonly originalLength: number;
			/** YaRN: whether the range between both ends at whole indices of frequencies. */
			readonly wholeIndices?: boolean;
	  };

/** Rotary position embeddings. */
export interface Rope {
	readonly base: number;
	/** Share of a head that turns. */
	readonly percent: number;
	readonly scaling: RopeScaling | null;
	/** Factor of every cosine and sine; 1 but for YaRN. */
	readonly amplitude: number;
	/** Whether a pair's columns are neighbours, instead of half of those that turn apart. */
	readonly interleaved: boolean;
}

/** The options of the language model at their places (keys/), and what functions of from-configuration.ts make of several. */
export interface HybridConfig extends At<""> {
	/** Symbol of every layer of the main part, first to last. */
	readonly pattern: readonly LayerKind[];
	/** Number of layers of each block, in order: 1, or the size of a bracket group. */
	readonly blocks: readonly number[];
	/** Multi-token prediction; null: none. */
	readonly mtp: MtpConfig | null;
	/** Rows of the embedding and the output layer, padding included. */
	readonly paddedVocabularySize: number;
	readonly embedding: At<"embedding."> & {
		/** Factor of the word embedding's rows, rounded to the model's type. */
		readonly scale: number;
	};
	/** Rows of the table of learned positions, which is added to the word embedding; null: none. */
	readonly learnedPositions: number | null;
	/** Whether the output layer is the word embedding. */
	readonly tieWordEmbeddings: boolean;
	/** f32, or bf16 with fp32 master weights. */
	readonly dtype: "f32" | "bf16";
	readonly crossEntropyRoundsBf16: boolean;
	readonly zLossCoefficient: number;
	readonly attention: At<"attention."> & {
		readonly softmaxScale: number;
		/** Most keys that a query sees, its own among them; null: all before it. */
		readonly window: number | null;
		readonly rope: Rope | null;
		/** Whether a learned logit of every head joins its softmax's denominators. */
		readonly sinks: boolean;
	};
	/** Multi-latent attention, with the heads and dropout of `attention`; null: no layer has it. */
	readonly latent:
		| (At<"latent."> & {
				/** Whether the latents are normalised. */
				readonly norms: boolean;
				readonly normEpsilon: number;
				readonly softmaxScale: number;
				readonly rope: Rope;
		  })
		| null;
	readonly mamba: At<"mamba."> & {
		readonly gatedNormEpsilon: number;
		/** Lower limit of Δ; 0 in Megatron. */
		readonly timeStepMinimum: number;
	};
	readonly linearAttention: At<"linearAttention.">;
	readonly biases: Biases;
	readonly mlp: At<"mlp."> & {
		readonly activation: ActivationName;
		/** Gated activations: upper limit of the gate, and limit ± of the linear half; infinity: no clamp. */
		readonly clamp: number;
	};
	readonly moe: At<"moe."> & {
		readonly scoreFunction: ScoreFunctionName;
		readonly preSoftmax: boolean;
		/** Number of best expert scores whose sum is a group's score. */
		readonly groupScoreTopk: number;
		/** Whether training chooses experts by Sinkhorn's balancing of a microbatch. */
		readonly sinkhorn: boolean;
		/** γ of the expert bias update after each step; 0: the bias is fixed. */
		readonly biasUpdateRate: number;
		readonly balancing: readonly BalancingLoss[];
		/** Rows of a run of gate or linear rows of an expert's fc1, which alternate in memory; 0: one half after the other. */
		readonly interleave: number;
		/** Precision of the fused operation's products. */
		readonly recipe: MlpRecipeName;
		/** Precision of the weight gradients' products. */
		readonly weightGradientRecipe: MlpRecipeName;
	};
	/** Precision of products of projections with their inputs and of the inputs' gradients; those of experts have their own. */
	readonly projectionRecipe: MlpRecipeName;
	/** Sizes of single layers of the main part that differ from the model's, by layer index. */
	readonly ofLayer: ReadonlyMap<number, LayerDifference>;
	/** Low-rank adapters, which train while all other weights are frozen; null: none. */
	readonly lora: LoraConfig | null;
	/** Activation recomputation; null: off. */
	readonly recompute: FullRecompute | SelectiveRecompute | null;
	/** Modules whose inputs of at least so many elements wait in the host's memory for backward; null: none. */
	readonly offload: { readonly modules: readonly OffloadModule[]; readonly leastElements: number } | null;
}

/** The sizes that a layer may have of its own. */
export interface LayerDifference {
	readonly attention?: Partial<HybridConfig["attention"]>;
	readonly mamba?: Partial<HybridConfig["mamba"]>;
	readonly moe?: Partial<HybridConfig["moe"]>;
}

/** The configuration of layer `index`; layers of MTP depths, which are numbered after the main part, have the model's sizes. */
export function configOfLayer(config: HybridConfig, index: number): HybridConfig {
	const own = config.ofLayer.get(index);
	if (own === undefined) return config;
	return {
		...config,
		attention: { ...config.attention, ...own.attention },
		mamba: { ...config.mamba, ...own.mamba },
		moe: { ...config.moe, ...own.moe },
	};
}

/** Widths of all key and value heads, of the convolution (q, k, v) and of the projection (q, k, v, z, b, a). */
export function linearAttentionSizes({
	keyHeads,
	keyDim,
	valueHeads,
	valueDim,
}: Omit<HybridConfig["linearAttention"], "convKernel">) {
	const [keys, values] = [keyHeads * keyDim, valueHeads * valueDim];
	return { keys, values, convolution: 2 * keys + values, projection: 2 * keys + 2 * values + 2 * valueHeads };
}

/** d_inner = H P and the widths that follow from it (docs/spec/language-model.md §2.1). */
export function mambaSizes(mamba: HybridConfig["mamba"]) {
	const inner = mamba.heads * mamba.headDim;
	const groupState = mamba.groups * mamba.stateDim;
	return {
		inner,
		groupState,
		convolution: inner + 2 * groupState,
		projection: 2 * inner + 2 * groupState + mamba.heads,
	};
}
