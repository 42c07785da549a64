/** HybridConfig of a training configuration, or of the model description in a checkpoint. */
import { paddedVocabularySize } from "../../config/derive.ts";
import { hasLayer, type LayerKind, parsePattern, segmentLengths } from "../../config/hybrid-pattern.ts";
import type { Fp8Module } from "../../config/keys/optimizer.ts";
import {
	type LanguageModelConfiguration,
	type SparseConfiguration,
	toldKeys,
	valuesAt,
	withDefaults,
} from "../../config/language-model.ts";
import { hasOwnSizes, keysOfWindow, modelOfLayer } from "../../config/per-layer.ts";
import { defaultRecomputeModules } from "../../config/recompute-modules.ts";
import { propertyOf, type TrainingConfiguration } from "../../config/schema.ts";
import type { MlpRecipeName } from "../../native/abi.ts";
import { activationOf } from "../../native/activations.ts";
import { languageLora } from "../lora.ts";
import type { BalancingLoss, Biases, HybridConfig, LayerDifference, MtpConfig, Rope, RopeScaling } from "./config.ts";
import { kinds } from "./kinds/index.ts";
import { type PipelineSegment, segmentsOf } from "./pipeline-segments.ts";
import { yarnAmplitude } from "./rope-frequencies.ts";

/** A configuration in which every key with a default has a value. */
type Keys = ReturnType<typeof withDefaults<SparseConfiguration>>;

/** The model of a configuration, or of the model's keys in one; absent keys have their defaults. */
export function hybridConfig(given: SparseConfiguration): HybridConfig {
	const c = withDefaults(given);
	const layers = layersOfPattern(c.hybridLayerPattern, {
		repeated: c.mtpUseRepeatedLayer,
		lossScalingFactor: c.mtpLossScalingFactor,
	});
	return {
		...valuesAt("", c),
		embeddingInitMethodStd: c.embeddingInitMethodStd ?? c.initMethodStd,
		...layers,
		paddedVocabularySize: paddedVocabularySize(c),
		embedding: { ...valuesAt("embedding.", c), scale: embeddingScale(c) },
		learnedPositions: c.positionEmbeddingType === "learned_absolute" ? c.maxPositionEmbeddings! : null,
		tieWordEmbeddings: !c.untieEmbeddingsAndOutputWeights,
		dtype: c.bf16 ? "bf16" : "f32",
		crossEntropyRoundsBf16: c.crossEntropyLossFusion,
		zLossCoefficient: c.zLossCoeff,
		attention: {
			...valuesAt("attention.", c),
			softmaxScale: c.softmaxScale ?? 1 / Math.sqrt(c.kvChannels),
			window: keysOfWindow(c.windowSize),
			rope: ropeConfig(c),
			sinks: c.softmaxType === "learnable",
		},
		latent: latentConfig(c),
		// The norm's epsilon is a constant in Megatron (docs/spec/language-model.md §2.1).
		mamba: { ...valuesAt("mamba.", c), gatedNormEpsilon: 1e-5, timeStepMinimum: 0 },
		linearAttention: valuesAt("linearAttention.", c),
		biases: { of: biasedProjections(c), start: "zero" },
		mlp: {
			...valuesAt("mlp.", c),
			activation: activationOf(c),
			clamp: c.activationFuncClampValue ?? Number.POSITIVE_INFINITY,
		},
		moe: moeConfig(c),
		projectionRecipe: recipeOf(c, "projections"),
		ofLayer: layerDifferences(c, layers.pattern),
		lora: languageLora(c),
		recompute: recomputation(c),
		offload: c.fineGrainedActivationOffloading
			? { modules: c.offloadModules ?? [], leastElements: c.minOffloadedTensorSize }
			: null,
	};
}

function biasedProjections(
	c: Pick<TrainingConfiguration, "addBiasLinear" | "addAttentionBias" | "addQkvBias">,
): Biases["of"] {
	if (c.addBiasLinear) return "all";
	if (c.addAttentionBias) return "attention";
	return c.addQkvBias ? "qkv" : "none";
}

/** As transformers, which multiplies a bf16 embedding by a bf16 factor. */
function embeddingScale({ embeddingMultiplier: factor, bf16 }: Keys): number {
	if (!bf16) return factor;
	// bf16 has eight binary digits.
	const unit = 2 ** (Math.floor(Math.log2(factor)) - 7);
	const digits = Math.round(factor / unit);
	const isTie = digits - factor / unit === 0.5;
	return unit * (isTie ? 2 * Math.floor(digits / 2) : digits);
}

function ropeConfig(c: Keys): Rope | null {
	const { positionEmbeddingType: type, rotaryBase: base, rotaryPercent: percent } = c;
	const interleaved = c.rotaryInterleaved ?? false;
	if (type === "rope") return { base, percent, scaling: ropeScaling(c), amplitude: 1, interleaved };
	if (type !== "yarn") return null;
	const factor = c.rotaryScalingFactor;
	return {
		base,
		percent,
		scaling: {
			type: "yarn",
			factor,
			lowTurns: c.yarnBetaSlow,
			highTurns: c.yarnBetaFast,
			originalLength: c.yarnOriginalMaxPositionEmbeddings,
			wholeIndices: c.yarnCorrectionRangeRoundToInt,
		},
		amplitude: c.yarnAttentionFactor ?? yarnAmplitude(factor, c.mscale, c.mscaleAllDim),
		interleaved,
	};
}

function latentConfig(c: Keys): HybridConfig["latent"] {
	if (!hasLayer(c.hybridLayerPattern, "latentAttention")) return null;
	const { qkHeadDim, qkPosEmbHeadDim, ropeType, rotaryInterleaved = true } = c;
	// Besides its rotary embedding, YaRN scales the scores here, by M(mscaleAllDim)².
	const magnitude = ropeType === "yarn" ? yarnAmplitude(c.rotaryScalingFactor, c.mscaleAllDim, 0) : 1;
	return {
		...valuesAt("latent.", c),
		norms: c.qkLayernorm,
		normEpsilon: c.latentNormEpsilon ?? c.normEpsilon,
		softmaxScale: magnitude ** 2 / Math.sqrt(qkHeadDim + qkPosEmbHeadDim),
		rope: ropeConfig({ ...c, rotaryInterleaved, positionEmbeddingType: ropeType, rotaryPercent: 1 })!,
	};
}

function ropeScaling(c: Keys): RopeScaling | null {
	if (c.rotarySeqLenInterpolationFactor != null) return { type: "linear", factor: c.rotarySeqLenInterpolationFactor };
	if (!c.useRopeScaling) return null;
	return {
		type: "llama3",
		factor: c.ropeScalingFactor,
		lowTurns: c.ropeScalingLowFreqFactor,
		highTurns: c.ropeScalingHighFreqFactor,
		originalLength: c.ropeScalingOriginalMaxPositionEmbeddings,
	};
}

function moeConfig(c: Keys): HybridConfig["moe"] {
	const sinkhorn = c.moeRouterLoadBalancingType.includes("sinkhorn");
	return {
		...valuesAt("moe.", c),
		// Sinkhorn's weights are scores over all experts: the sigmoid of a single one, the softmax of several.
		scoreFunction: (sinkhorn ? c.moeRouterTopk === 1 : c.moeRouterScoreFunction === "sigmoid") ? "sigmoid" : "softmax",
		preSoftmax: sinkhorn || c.moeRouterPreSoftmax,
		groupScoreTopk: Math.max(1, Math.floor(c.moeRouterTopk / c.moeRouterGroupTopk)),
		sinkhorn,
		biasUpdateRate: updatesBias(c) ? c.moeRouterBiasUpdateRate : 0,
		balancing: balancingLosses(c),
		interleave: c.moeMlpGluInterleaveSize ?? 0,
		recipe: recipeOf(c, "experts"),
		weightGradientRecipe: c.fp8Wgrad ? "e4m3Blockwise" : "plain",
	};
}

function recipeOf({ fp8Format, fp8Modules }: Keys, module: Fp8Module): MlpRecipeName {
	return fp8Format !== null && fp8Modules.includes(module) ? "e4m3Blockwise" : "plain";
}

function layerDifferences(c: Keys, pattern: readonly LayerKind[]): ReadonlyMap<number, LayerDifference> {
	if (!hasOwnSizes(c)) return new Map();
	return new Map(pattern.map((kind, index) => [index, kinds[kind].ownSizes({ ...c, ...modelOfLayer(c, index) })]));
}

/** Layers, blocks and MTP depths of a layer pattern. */
function layersOfPattern(
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

/** The model of a description, whatever else it says: without auxiliary losses, and every MTP depth with parameters of its own. */
export function describedConfig(
	description: LanguageModelConfiguration,
	{ bf16 }: Pick<TrainingConfiguration, "bf16">,
): HybridConfig {
	const all: Partial<TrainingConfiguration> = description;
	const told = toldKeys.map(propertyOf).filter((property) => all[property] !== undefined);
	return hybridConfig({
		...(Object.fromEntries(told.map((property) => [property, all[property]])) as unknown as SparseConfiguration),
		...{ bf16, makeVocabSizeDivisibleBy: 1, embeddingInitMethodStd: description.initMethodStd },
		...{ mtpLossScalingFactor: 0, mtpUseRepeatedLayer: false, moeRouterBiasUpdateRate: 0 },
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
function updatesBias(c: Keys): boolean {
	const frozen = c.loraRank !== null || c.freezeModel === true;
	return c.moeRouterEnableExpertBias && !frozen && !c.moeRouterForceLoadBalancing;
}

function recomputation(c: Keys): HybridConfig["recompute"] {
	switch (c.recomputeGranularity) {
		case "full":
			return { granularity: "full", method: c.recomputeMethod, layers: c.recomputeNumLayers };
		case "selective":
			return { granularity: "selective", modules: c.recomputeModules ?? defaultRecomputeModules };
		default:
			return null;
	}
}

function balancingLosses(c: Keys): BalancingLoss[] {
	return c.moeRouterLoadBalancingType.flatMap((type, index) => {
		const coefficient = c.moeAuxLossCoeff[index] ?? 0;
		return type === "none" || coefficient === 0 ? [] : [{ type: type as BalancingLoss["type"], coefficient }];
	});
}
