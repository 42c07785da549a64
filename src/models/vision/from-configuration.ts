/** EncoderConfig of a training configuration (docs/spec/vision.md §1.1, §1.2, §3). */
import { parseHybridPattern } from "../../config/hybrid-pattern.ts";
import { withDefaults } from "../../config/language-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { visionLora } from "../lora.ts";
import { featureWidth, outputWidth, type VitConfig } from "../vit/config.ts";
import type { EncoderConfig } from "./encoder.ts";

const activations = {
	gelu: "geluErf",
	"gelu-tanh": "geluTanh",
	swiglu: "swiglu",
	"squared-relu": "squaredRelu",
} as const;

/** Patches of a window's side: whole blocks of those that become a row, as transformers counts them. */
function windowSide(pixels: number, { pixelShuffle, patchDim }: TrainingConfiguration): number {
	const block = pixelShuffle ? 2 : 1;
	return block * Math.max(1, Math.floor(pixels / block / patchDim));
}

/** Uses MIMO's choices where no key decides, such as class tokens without positions. */
export function encoderConfig(c: TrainingConfiguration): EncoderConfig {
	// Upstream copies the language model's initialisation, including the number of its layers.
	const outputInitMethodStd = c.initMethodStd / Math.sqrt(parseHybridPattern(c.hybridLayerPattern).length);
	const initialisation = { initMethodStd: c.initMethodStd, outputInitMethodStd };
	const tower: VitConfig = {
		...initialisation,
		layers: c.visionNumLayers,
		hiddenSize: c.visionHiddenSize,
		heads: c.visionNumAttentionHeads,
		headDim: c.visionKvChannels,
		ffnHiddenSize: c.visionFfnHiddenSize,
		positionTable: {
			rows: Math.floor(c.visionMaxImgH / c.patchDim),
			columns: Math.floor(c.visionMaxImgW / c.patchDim),
		},
		normEpsilon: c.visionNormEpsilon,
		normalization: c.visionNormalization,
		windows:
			c.visionWindowSize === null
				? null
				: { side: windowSide(c.visionWindowSize, c), full: c.fullattBlockIndexes ?? [] },
		softmaxScale: 1 / Math.sqrt(c.visionKvChannels),
		patchSize: c.patchDim,
		temporalPatch: c.visionTemporalPatchSize,
		rotaryBase: c.visionRotaryBase,
		taps: c.deepstackVisualIndexes ?? c.visionFeatureLayers ?? [],
		joinsTaps: c.visionFeatureLayers !== null,
		...{ patchBias: c.visionPatchBias, patchNorm: c.visionPatchNorm },
		...{ qkvBias: c.visionAddQkvBias, linearBias: c.visionAddBiasLinear, qkNorm: c.visionQkNorm },
		classTokens: c.classTokenLen,
		classPositions: c.visionClassTokenPositions,
		positions: { mode: c.visionPositionMode, aspectRatioSelect: false, randomCrop: c.visionPositionCrop },
		activation: activations[c.visionActivation],
		layerScale: c.visionLayerScale,
		finalLayerNorm: c.visionFinalLayernorm,
		dropClassTokens: c.disableVisionClassToken,
		pixelShuffle: c.pixelShuffle,
		lora: visionLora(c, "vision_model"),
		dtype: c.bf16 ? "bf16" : "f32",
	};
	return {
		tower,
		projector: {
			...initialisation,
			type: c.visionProjectionType,
			inputSize: tower.joinsTaps ? outputWidth(tower) : featureWidth(tower),
			outputSize: c.hiddenSize,
			ffnHiddenSize: c.visionProjectionFfnHiddenSize,
			normEpsilon: c.visionProjectionNorm ? projectionEpsilon(c) : null,
			normalization: c.visionProjectionNormalization,
			stem: c.visionProjectionStem,
			activation: activations[c.visionProjectionActivation],
			bias: c.visionProjectionBias,
			deepstack: { count: tower.joinsTaps ? 0 : tower.taps.length, normEpsilon: tower.normEpsilon },
			lora: visionLora(c, "vision_projection"),
			newline: c.visionImageNewline,
		},
	};
}

/** The encoder of a description that has no training keys. */
export function describedEncoder(
	description: Partial<TrainingConfiguration>,
	{ bf16 }: Pick<TrainingConfiguration, "bf16">,
): EncoderConfig {
	const untold = { visionPositionCrop: false, loraRank: null, loraTargetModules: [], bf16 };
	return encoderConfig({ ...withDefaults(description), ...untold } as TrainingConfiguration);
}

/**
 * PyTorch's default for a LayerNorm. For an RMS norm the language model's epsilon, as in Megatron-Bridge; transformers has 1e-5, which
 * published models also use for the language model.
 */
function projectionEpsilon({ normEpsilon, visionProjectionNormalization }: TrainingConfiguration): number {
	return visionProjectionNormalization === "LayerNorm" ? 1e-5 : normEpsilon;
}
