/** The encoder module that a training configuration stands for (spec vision 1.1, 1.2, 3). */
import { parseHybridPattern } from "../../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { outputWidth, type RadioConfig } from "../radio/config.ts";
import type { EncoderConfig } from "./encoder.ts";

export type EncoderKeys = Pick<
	TrainingConfiguration,
	| "bf16"
	| "classTokenLen"
	| "disableVisionClassToken"
	| "hiddenSize"
	| "hybridLayerPattern"
	| "initMethodStd"
	| "patchDim"
	| "pixelShuffle"
	| "visionFfnHiddenSize"
	| "visionFinalLayernorm"
	| "visionHiddenSize"
	| "visionKvChannels"
	| "visionMaxImgH"
	| "visionMaxImgW"
	| "visionNumAttentionHeads"
	| "visionNumLayers"
	| "visionPositionCrop"
	| "visionPositionMode"
	| "visionProjectionFfnHiddenSize"
	| "visionProjectionType"
>;

/** MIMO's choices: class tokens without positions, no norm in the projector. */
export function encoderConfig(c: EncoderKeys): EncoderConfig {
	// Upstream copies the language model's initialisation, its depth included.
	const outputInitMethodStd = c.initMethodStd / Math.sqrt(parseHybridPattern(c.hybridLayerPattern).length);
	const initialisation = { initMethodStd: c.initMethodStd, outputInitMethodStd };
	const tower: RadioConfig = {
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
		normEpsilon: 1e-6,
		softmaxScale: 1 / Math.sqrt(c.visionKvChannels),
		patchSize: c.patchDim,
		classTokens: c.classTokenLen,
		positions: { mode: c.visionPositionMode, aspectRatioSelect: false, randomCrop: c.visionPositionCrop },
		finalLayerNorm: c.visionFinalLayernorm,
		dropClassTokens: c.disableVisionClassToken,
		pixelShuffle: c.pixelShuffle,
		dtype: c.bf16 ? "bf16" : "f32",
	};
	return {
		tower,
		projector: {
			...initialisation,
			type: c.visionProjectionType,
			inputSize: outputWidth(tower),
			outputSize: c.hiddenSize,
			ffnHiddenSize: c.visionProjectionFfnHiddenSize,
			normEpsilon: null,
		},
	};
}
