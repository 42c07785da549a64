/** Shape and options of the hybrid Mamba-2 / attention / MLP / MoE language model (docs/spec/language-model.md §9). */
import type { LayerSymbol } from "../../config/hybrid-pattern.ts";
import type { RecomputeModule } from "../../config/recompute-modules.ts";
import type { ActivationName, MlpRecipeName, ScoreFunctionName } from "../../native/abi.ts";
import type { LoraConfig } from "./lora.ts";

export interface BalancingLoss {
	readonly type: "seq_aux_loss" | "aux_loss" | "global_aux_loss";
	readonly coefficient: number;
}

/** Multi-token prediction (docs/spec/language-model.md §5.4). */
export interface MtpConfig {
	/** Further tokens that are predicted. */
	readonly depths: number;
	/** Symbol of every layer of a depth. */
	readonly pattern: readonly LayerSymbol[];
	/** Every depth runs the first one's parameters. */
	readonly repeated: boolean;
	/** Weight of all depths' losses together beside the language model's. */
	readonly lossScalingFactor: number;
}

/**
 * Blocks of every stage that backward computes again. uniform: all blocks, in runs of `layers`; each run's input alone is kept.
 * block: the first `layers` blocks, one by one.
 */
export interface FullRecompute {
	readonly granularity: "full";
	readonly method: "uniform" | "block";
	readonly layers: number;
}

/** Parts of every layer. */
export interface SelectiveRecompute {
	readonly granularity: "selective";
	readonly modules: readonly RecomputeModule[];
}

export interface HybridConfig {
	/** Symbol of every layer of the main part, first to last. */
	readonly pattern: readonly LayerSymbol[];
	/** Layers of every block, in order: 1, or those of a bracket group. */
	readonly blocks: readonly number[];
	/** Multi-token prediction; null: none. */
	readonly prediction: MtpConfig | null;
	readonly hiddenSize: number;
	readonly vocabularySize: number;
	/** Rows of embedding and output layer, padding included. */
	readonly paddedVocabularySize: number;
	readonly normEpsilon: number;
	readonly initMethodStd: number;
	readonly embeddingInitMethodStd: number;
	readonly hiddenDropout: number;
	/** The output layer is the word embedding. */
	readonly tieWordEmbeddings: boolean;
	/** fp32 stored and computed, or bf16 with fp32 master weights. */
	readonly dtype: "f32" | "bf16";
	readonly crossEntropyRoundsBf16: boolean;
	readonly zLossCoefficient: number;
	readonly attention: {
		readonly heads: number;
		readonly queryGroups: number;
		readonly headDim: number;
		readonly softmaxScale: number;
		readonly dropout: number;
		readonly rope: { readonly base: number; readonly percent: number } | null;
	};
	readonly mamba: {
		readonly heads: number;
		readonly headDim: number;
		readonly groups: number;
		readonly stateDim: number;
		readonly convKernel: number;
		readonly chunkSize: number;
		readonly gatedNormEpsilon: number;
		/** Lower limit of Δ; 0 in Megatron. */
		readonly timeStepMinimum: number;
	};
	/** Biases in attention projections, MLPs, experts and routers, and how they begin: drawn ones weigh in every gradient. */
	readonly biases: "none" | "zero" | "drawn";
	readonly mlp: {
		readonly ffnHiddenSize: number;
		readonly activation: ActivationName;
		/** Of a gated activation: the gate is at most this, the linear half within ± this; infinity: no clamp. */
		readonly clamp: number;
		/** Added to the linear half of quick GeGLU. */
		readonly linearOffset: number;
	};
	readonly moe: {
		readonly experts: number;
		readonly topk: number;
		readonly ffnHiddenSize: number;
		/** 0: no shared expert. */
		readonly sharedExpertSize: number;
		readonly scoreFunction: ScoreFunctionName;
		readonly preSoftmax: boolean;
		readonly scalingFactor: number;
		readonly groups: number;
		readonly groupTopk: number;
		/** Experts whose best scores make a group's score. */
		readonly groupScoreTopk: number;
		readonly expertBias: boolean;
		/** γ of the bias update after every step; 0 leaves the bias alone. */
		readonly biasUpdateRate: number;
		/** Training passes route by random logits: a benchmark. */
		readonly forceLoadBalancing: boolean;
		readonly balancing: readonly BalancingLoss[];
		readonly zLossCoefficient: number;
		/** Rows of an expert's gate and linear halves that lie in turns in memory; 0: halves. */
		readonly interleave: number;
		/** Whether experts run as one operation: as said, or where they can (auto). */
		readonly fused: "auto" | "on" | "off";
		/** How experts as one operation multiply. */
		readonly recipe: MlpRecipeName;
		/** How the gradients of their weights do. */
		readonly weightGradientRecipe: MlpRecipeName;
	};
	/** Differences between single layers of the main part and the model, by layer index. */
	readonly ofLayer: ReadonlyMap<number, LayerDifference>;
	/** Low-rank adapters, which train in the place of all weights; null: none. */
	readonly lora: LoraConfig | null;
	/** The parts that backward computes again; null: backward computes nothing again. */
	readonly recompute: FullRecompute | SelectiveRecompute | null;
}

/** Part of a configuration that one layer has otherwise. */
export interface LayerDifference {
	readonly attention?: Partial<HybridConfig["attention"]>;
	readonly mamba?: Partial<HybridConfig["mamba"]>;
	readonly moe?: Partial<HybridConfig["moe"]>;
}

/** The configuration as layer `index` has it; layers of prediction depths, which follow, have the model's. */
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
