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
	| "visionProjectionType"
>;

/** What a tower's size is besides patches and class tokens. */
export type TowerSize = Pick<
	RadioConfig,
	"layers" | "hiddenSize" | "heads" | "headDim" | "ffnHiddenSize" | "positionTable"
>;

/** RADIO ViT-H, the tower upstream's model provider has. */
export const radioHuge: TowerSize = {
	layers: 32,
	hiddenSize: 1280,
	heads: 16,
	headDim: 80,
	ffnHiddenSize: 5120,
	positionTable: { rows: 128, columns: 128 },
};

/** MIMO's choices: CPE with random crops, a final norm, no norm in the projector. */
export function encoderConfig(c: EncoderKeys, size: TowerSize = radioHuge): EncoderConfig {
	// Upstream copies the language model's initialisation, its depth included.
	const outputInitMethodStd = c.initMethodStd / Math.sqrt(parseHybridPattern(c.hybridLayerPattern).length);
	const initialisation = { initMethodStd: c.initMethodStd, outputInitMethodStd };
	const tower: RadioConfig = {
		...size,
		...initialisation,
		normEpsilon: 1e-6,
		softmaxScale: 1 / Math.sqrt(size.headDim),
		patchSize: c.patchDim,
		classTokens: c.classTokenLen,
		positions: { mode: "cpe", aspectRatioSelect: false, randomCrop: true },
		finalLayerNorm: true,
		dropClassTokens: c.disableVisionClassToken,
		pixelShuffle: c.pixelShuffle,
		dtype: c.bf16 ? "bf16" : "f32",
	};
	const inputSize = outputWidth(tower);
	return {
		tower,
		projector: {
			...initialisation,
			type: c.visionProjectionType,
			inputSize,
			outputSize: c.hiddenSize,
			ffnHiddenSize: 4 * inputSize,
			normEpsilon: null,
		},
	};
}
