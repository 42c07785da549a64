/** HybridConfig of a training configuration, or of the model description in a checkpoint. */
import { paddedVocabularySize } from "../../config/derive.ts";
import { hasLayer, type LayerKind, parsePattern, segmentLengths } from "../../config/hybrid-pattern.ts";
import { ropeScalingDefaults } from "../../config/keys/model.ts";
import { hasOwnSizes, keysOfWindow, modelOfLayer, type PerLayerSize } from "../../config/per-layer.ts";
import { defaultRecomputeModules } from "../../config/recompute-modules.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { type YarnValues, yarnOf } from "../../config/yarn.ts";
import { type ActivationKey, activationOf } from "../../native/activations.ts";
import { languageLora } from "../lora.ts";
import {
	type BalancingLoss,
	type HybridConfig,
	type LayerDifference,
	linearAttentionConfig,
	type MtpConfig,
	type Rope,
	type RopeScaling,
} from "./config.ts";
import { kinds } from "./kinds/index.ts";
import { type PipelineSegment, segmentsOf } from "./pipeline-segments.ts";
import { yarnAmplitude } from "./rope-frequencies.ts";

/** The configuration keys that the language model depends on. */
export type LanguageModelKeys = Pick<
	TrainingConfiguration,
	| "activationFuncClampValue"
	| "addBiasLinear"
	| "attentionDropout"
	| "bf16"
	| "crossEntropyLossFusion"
	| "embeddingInitMethodStd"
	| "ffnHiddenSize"
	| "fp8Format"
	| "fp8Wgrad"
	| "gluLinearOffset"
	| "hiddenDropout"
	| "hiddenSize"
	| "hybridLayerPattern"
	| "initMethodStd"
	| "kvChannels"
	| "loraAlpha"
	| "loraDropout"
	| "loraRank"
	| "loraTargetModules"
	| "makeVocabSizeDivisibleBy"
	| "mambaChunkSize"
	| "mambaConvKernelDim"
	| "mambaHeadDim"
	| "mambaNumGroups"
	| "mambaNumHeads"
	| "mambaStateDim"
	| "moeAuxLossCoeff"
	| "moeFfnHiddenSize"
	| "moeFusedMlp"
	| "moeMlpGluInterleaveSize"
	| "moeRouterBiasUpdateRate"
	| "moeRouterEnableExpertBias"
	| "moeRouterForceLoadBalancing"
	| "moeRouterGroupTopk"
	| "moeRouterLoadBalancingType"
	| "moeRouterNumGroups"
	| "moeRouterPreSoftmax"
	| "moeRouterScoreFunction"
	| "moeRouterTopk"
	| "moeRouterTopkScalingFactor"
	| "moeSharedExpertIntermediateSize"
	| "moeZLossCoeff"
	| "mtpLossScalingFactor"
	| "mtpUseRepeatedLayer"
	| "normEpsilon"
	| "numAttentionHeads"
	| "numExperts"
	| "numQueryGroups"
	| "positionEmbeddingType"
	| "recomputeGranularity"
	| "recomputeMethod"
	| "recomputeModules"
	| "recomputeNumLayers"
	| "rotaryBase"
	| "rotaryPercent"
	| ActivationKey
	| "untieEmbeddingsAndOutputWeights"
	| "vocabSize"
	| "zLossCoeff"
> &
	Partial<Pick<TrainingConfiguration, PerLayerSize["list"] | LaterKey> & YarnValues>;

/** Keys that descriptions in older checkpoints lack, where they have their defaults. */
type LaterKey =
	| "addQkvBias"
	| "applyLayernorm1p"
	| "embeddingMultiplier"
	| "embeddingPaddingIdx"
	| "postLayernorm"
	| "rotaryBaseLocal"
	| "softmaxScale"
	| "attentionOutputGate"
	| "fineGrainedActivationOffloading"
	| keyof typeof latentDefaults
	| "latentNormEpsilon"
	| "freezeModel"
	| "linearConvKernelDim"
	| "linearKeyHeadDim"
	| "linearNumKeyHeads"
	| "linearNumValueHeads"
	| "linearValueHeadDim"
	| "maxPositionEmbeddings"
	| "moeLatentSize"
	| "minOffloadedTensorSize"
	| "moeSharedExpertGate"
	| "normalization"
	| "offloadModules"
	| "qkLayernorm"
	| "softmaxType"
	| "windowSize"
	| "windowAttnSkipFreq"
	| "rotarySeqLenInterpolationFactor"
	| "useRopeScaling"
	| "ropeScalingFactor"
	| "ropeScalingLowFreqFactor"
	| "ropeScalingHighFreqFactor"
	| "ropeScalingOriginalMaxPositionEmbeddings";

export function hybridConfig(c: LanguageModelKeys): HybridConfig {
	const layers = layersOfPattern(c.hybridLayerPattern, {
		repeated: c.mtpUseRepeatedLayer,
		lossScalingFactor: c.mtpLossScalingFactor,
	});
	return {
		...layers,
		hiddenSize: c.hiddenSize,
		vocabularySize: c.vocabSize,
		paddedVocabularySize: paddedVocabularySize(c),
		normalization: c.normalization ?? "RMSNorm",
		normEpsilon: c.normEpsilon,
		zeroCentredNorms: c.applyLayernorm1p ?? false,
		postNorms: c.postLayernorm ?? false,
		embedding: { scale: embeddingScale(c), paddingId: c.embeddingPaddingIdx ?? null },
		learnedPositions: c.positionEmbeddingType === "learned_absolute" ? c.maxPositionEmbeddings! : null,
		initMethodStd: c.initMethodStd,
		embeddingInitMethodStd: c.embeddingInitMethodStd,
		hiddenDropout: c.hiddenDropout,
		tieWordEmbeddings: !c.untieEmbeddingsAndOutputWeights,
		dtype: c.bf16 ? "bf16" : "f32",
		crossEntropyRoundsBf16: c.crossEntropyLossFusion,
		zLossCoefficient: c.zLossCoeff,
		attention: attentionConfig(c),
		latent: latentConfig(c),
		mamba: mambaConfig(c),
		linearAttention: linearAttentionConfig(c),
		biases: { of: c.addBiasLinear ? "all" : c.addQkvBias ? "qkv" : "none", start: "zero" },
		mlp: {
			ffnHiddenSize: c.ffnHiddenSize,
			activation: activationOf(c),
			clamp: c.activationFuncClampValue ?? Number.POSITIVE_INFINITY,
			linearOffset: c.gluLinearOffset,
		},
		moe: moeConfig(c),
		ofLayer: layerDifferences(c, layers.pattern),
		lora: languageLora(c),
		recompute: recomputation(c),
		offload: c.fineGrainedActivationOffloading
			? { modules: c.offloadModules ?? [], leastElements: c.minOffloadedTensorSize ?? 0 }
			: null,
	};
}

/** As transformers, which multiplies a bf16 embedding by a bf16 factor. */
function embeddingScale({ embeddingMultiplier: factor = 1, bf16 }: LanguageModelKeys): number {
	if (!bf16) return factor;
	// bf16 has eight binary digits.
	const unit = 2 ** (Math.floor(Math.log2(factor)) - 7);
	const digits = Math.round(factor / unit);
	const isTie = digits - factor / unit === 0.5;
	return unit * (isTie ? 2 * Math.floor(digits / 2) : digits);
}

function attentionConfig(c: LanguageModelKeys): HybridConfig["attention"] {
	return {
		heads: c.numAttentionHeads,
		queryGroups: c.numQueryGroups,
		headDim: c.kvChannels,
		softmaxScale: c.softmaxScale ?? 1 / Math.sqrt(c.kvChannels),
		window: keysOfWindow(c.windowSize),
		dropout: c.attentionDropout,
		rope: ropeConfig(c),
		localRopeBase: c.rotaryBaseLocal ?? null,
		qkNorm: c.qkLayernorm ?? false,
		sinks: c.softmaxType === "learnable",
		outputGate: c.attentionOutputGate ?? false,
	};
}

function ropeConfig(c: LanguageModelKeys): Rope | null {
	const { positionEmbeddingType: type, rotaryBase: base, rotaryPercent: percent } = c;
	const interleaved = c.rotaryInterleaved ?? false;
	if (type === "rope") return { base, percent, scaling: ropeScaling(c), amplitude: 1, interleaved };
	if (type !== "yarn") return null;
	const yarn = yarnOf(c);
	const factor = yarn.rotaryScalingFactor;
	return {
		base,
		percent,
		scaling: {
			type: "yarn",
			factor,
			lowTurns: yarn.yarnBetaSlow,
			highTurns: yarn.yarnBetaFast,
			originalLength: yarn.yarnOriginalMaxPositionEmbeddings,
			wholeIndices: yarn.yarnCorrectionRangeRoundToInt,
		},
		amplitude: yarn.yarnAttentionFactor ?? yarnAmplitude(factor, yarn.mscale, yarn.mscaleAllDim),
		interleaved,
	};
}

/** Values of the keys of multi-latent attention in descriptions of models without it. */
const latentDefaults = {
	qLoraRank: null,
	kvLoraRank: 512,
	qkHeadDim: 128,
	qkPosEmbHeadDim: 64,
	vHeadDim: 128,
	rotaryInterleaved: true,
	ropeType: "yarn",
} satisfies Partial<TrainingConfiguration>;

function latentConfig(c: LanguageModelKeys): HybridConfig["latent"] {
	if (!hasLayer(c.hybridLayerPattern, "latentAttention")) return null;
	const own = { ...latentDefaults, ...c };
	const { qLoraRank, kvLoraRank, qkHeadDim, qkPosEmbHeadDim, vHeadDim, ropeType } = own;
	const { rotaryScalingFactor, mscaleAllDim } = yarnOf(c);
	// Besides its rotary embedding, YaRN scales the scores here, by M(mscaleAllDim)².
	const magnitude = ropeType === "yarn" ? yarnAmplitude(rotaryScalingFactor, mscaleAllDim, 0) : 1;
	return {
		queryRank: qLoraRank,
		keyValueRank: kvLoraRank,
		contentDim: qkHeadDim,
		positionDim: qkPosEmbHeadDim,
		valueDim: vHeadDim,
		norms: c.qkLayernorm ?? false,
		normEpsilon: c.latentNormEpsilon ?? c.normEpsilon,
		softmaxScale: magnitude ** 2 / Math.sqrt(qkHeadDim + qkPosEmbHeadDim),
		rope: ropeConfig({ ...own, positionEmbeddingType: ropeType, rotaryPercent: 1 })!,
	};
}

function ropeScaling(c: LanguageModelKeys): RopeScaling | null {
	if (c.rotarySeqLenInterpolationFactor != null) return { type: "linear", factor: c.rotarySeqLenInterpolationFactor };
	if (!c.useRopeScaling) return null;
	return {
		type: "llama3",
		factor: c.ropeScalingFactor ?? ropeScalingDefaults.factor,
		lowTurns: c.ropeScalingLowFreqFactor ?? ropeScalingDefaults.lowFreqFactor,
		highTurns: c.ropeScalingHighFreqFactor ?? ropeScalingDefaults.highFreqFactor,
		originalLength: c.ropeScalingOriginalMaxPositionEmbeddings ?? ropeScalingDefaults.originalMaxPositionEmbeddings,
	};
}

function mambaConfig(c: LanguageModelKeys): HybridConfig["mamba"] {
	return {
		heads: c.mambaNumHeads,
		headDim: c.mambaHeadDim,
		groups: c.mambaNumGroups,
		stateDim: c.mambaStateDim,
		convKernel: c.mambaConvKernelDim,
		chunkSize: c.mambaChunkSize,
		// A constant in Megatron (docs/spec/language-model.md §2.1).
		gatedNormEpsilon: 1e-5,
		timeStepMinimum: 0,
	};
}

function moeConfig(c: LanguageModelKeys): HybridConfig["moe"] {
	const sinkhorn = c.moeRouterLoadBalancingType.includes("sinkhorn");
	return {
		experts: c.numExperts,
		topk: c.moeRouterTopk,
		ffnHiddenSize: c.moeFfnHiddenSize,
		latentSize: c.moeLatentSize ?? null,
		sharedExpertSize: c.moeSharedExpertIntermediateSize,
		sharedExpertGate: c.moeSharedExpertGate ?? false,
		// Sinkhorn's weights are scores over all experts: the sigmoid of a single one, the softmax of several.
		scoreFunction: (sinkhorn ? c.moeRouterTopk === 1 : c.moeRouterScoreFunction === "sigmoid") ? "sigmoid" : "softmax",
		preSoftmax: sinkhorn || c.moeRouterPreSoftmax,
		scalingFactor: c.moeRouterTopkScalingFactor,
		groups: c.moeRouterNumGroups,
		groupTopk: c.moeRouterGroupTopk,
		groupScoreTopk: Math.max(1, Math.floor(c.moeRouterTopk / c.moeRouterGroupTopk)),
		expertBias: c.moeRouterEnableExpertBias,
		sinkhorn,
		biasUpdateRate: updatesBias(c) ? c.moeRouterBiasUpdateRate : 0,
		forceLoadBalancing: c.moeRouterForceLoadBalancing,
		balancing: balancingLosses(c),
		zLossCoefficient: c.moeZLossCoeff,
		interleave: c.moeMlpGluInterleaveSize ?? 0,
		fused: c.moeFusedMlp,
		recipe: c.fp8Format === null ? "plain" : "e4m3Blockwise",
		weightGradientRecipe: c.fp8Wgrad ? "e4m3Blockwise" : "plain",
	};
}

function layerDifferences(c: LanguageModelKeys, pattern: readonly LayerKind[]): ReadonlyMap<number, LayerDifference> {
	if (!hasOwnSizes(c)) return new Map();
	return new Map(pattern.map((kind, index) => [index, kinds[kind].ownSizes({ ...c, ...modelOfLayer(c, index) })]));
}

/** Layers, blocks and MTP depths of a layer pattern. */
export function layersOfPattern(
	pattern: string,
	options: Pick<MtpConfig, "repeated" | "lossScalingFactor">,
): Pick<HybridConfig, "pattern" | "blocks" | "mtp"> {
	const { segments, mtp } = parsePattern(pattern);
	return {
		pattern: segments.flat(2),
		blocks: segments.flat().map(({ length }) => length),
		mtp: mtp && { depths: mtp.depths, pattern: mtp.layers, ...options },
	};
}

/** Values of the keys that model descriptions of other formats lack. */
const untold = {
	makeVocabSizeDivisibleBy: 1,
	crossEntropyLossFusion: false,
	zLossCoeff: 0,
	mtpLossScalingFactor: 0,
	mtpUseRepeatedLayer: false,
	moeRouterLoadBalancingType: ["none"],
	moeAuxLossCoeff: [0],
	moeZLossCoeff: 0,
	moeRouterBiasUpdateRate: 0,
	moeRouterForceLoadBalancing: false,
	fp8Format: null,
	fp8Wgrad: false,
	moeFusedMlp: "auto",
	moeMlpGluInterleaveSize: null,
	recomputeGranularity: null,
	recomputeMethod: "uniform",
	recomputeModules: null,
	recomputeNumLayers: 1,
	loraRank: null,
	loraAlpha: 1,
	loraDropout: 0,
	loraTargetModules: [],
} satisfies Partial<LanguageModelKeys>;

/** The model of a description that has no training keys: without auxiliary losses. */
export function describedConfig(
	description: Omit<LanguageModelKeys, keyof typeof untold | "bf16" | "embeddingInitMethodStd">,
	{ bf16 }: Pick<LanguageModelKeys, "bf16">,
): HybridConfig {
	return hybridConfig({
		...description,
		...untold,
		...{ bf16, embeddingInitMethodStd: description.initMethodStd },
	});
}

/** The pipeline segments of a configuration. */
export function segmentsOfConfiguration(
	c: Pick<TrainingConfiguration, "hybridLayerPattern" | "llmPp">,
): PipelineSegment[] {
	return segmentsOf(segmentLengths(c.hybridLayerPattern, c.llmPp));
}

/**
 * Whether the expert bias is updated: not in a frozen parent, nor with adapters, whose base is frozen, nor for a description without
 * router keys.
 */
function updatesBias(c: LanguageModelKeys): boolean {
	const frozen = c.loraRank !== null || c.freezeModel === true;
	return c.moeRouterEnableExpertBias && !frozen && !c.moeRouterForceLoadBalancing;
}

function recomputation(c: LanguageModelKeys): HybridConfig["recompute"] {
	switch (c.recomputeGranularity) {
		case "full":
			return { granularity: "full", method: c.recomputeMethod, layers: c.recomputeNumLayers };
		case "selective":
			return { granularity: "selective", modules: c.recomputeModules ?? defaultRecomputeModules };
		default:
			return null;
	}
}

function balancingLosses(c: LanguageModelKeys): BalancingLoss[] {
	return c.moeRouterLoadBalancingType.flatMap((type, index) => {
		const coefficient = c.moeAuxLossCoeff[index] ?? 0;
		return type === "none" || coefficient === 0 ? [] : [{ type: type as BalancingLoss["type"], coefficient }];
	});
}
