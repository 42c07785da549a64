/** A tower and its projector, small enough for tests. */

import type { EncoderConfig } from "../../../src/models/vision/encoder.ts";
import { plainProjector } from "../../../src/models/vision/projector.ts";
import { plainTower, type VitConfig } from "../../../src/models/vit/config.ts";

export const tinyTower: VitConfig = {
	layers: 2,
	hiddenSize: 16,
	heads: 2,
	headDim: 8,
	ffnHiddenSize: 24,
	normEpsilon: 1e-6,
	softmaxScale: 8 ** -0.5,
	patchSize: 2,
	...plainTower,
	classTokens: 3,
	positionTable: { rows: 6, columns: 6 },
	positions: { mode: "cpe", aspectRatioSelect: false, randomCrop: false },
	activation: "geluTanh",
	finalLayerNorm: true,
	dropClassTokens: true,
	pixelShuffle: true,
	initMethodStd: 0.2,
	outputInitMethodStd: 0.1,
	lora: null,
	dtype: "f32",
};

/** The same with norms of queries and keys, and without biases of them. */
export const normedTower: VitConfig = { ...tinyTower, qkNorm: true, qkvBias: false, normalization: "RMSNorm" };

/** An MLP from the tiny tower's rows, whose pixels are shuffled, to rows of `outputSize`. */
export const tinyProjector = (outputSize: number) =>
	({
		type: "mlp",
		inputSize: 64,
		outputSize,
		ffnHiddenSize: 32,
		...{ ...plainProjector, normEpsilon: 1e-5 },
		initMethodStd: 0.2,
		outputInitMethodStd: 0.1,
		lora: null,
	}) as const satisfies EncoderConfig["projector"];
