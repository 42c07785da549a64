/** A tower small enough for tests. */
import type { RadioConfig } from "../../../src/models/radio/config.ts";

export const tinyTower: RadioConfig = {
	layers: 2,
	hiddenSize: 16,
	heads: 2,
	headDim: 8,
	ffnHiddenSize: 24,
	normEpsilon: 1e-6,
	softmaxScale: 8 ** -0.5,
	patchSize: 2,
	classTokens: 3,
	positionTable: { rows: 6, columns: 6 },
	positions: { mode: "cpe", aspectRatioSelect: false, randomCrop: false },
	activation: "geluTanh",
	finalLayerNorm: true,
	dropClassTokens: true,
	pixelShuffle: true,
	initMethodStd: 0.2,
	outputInitMethodStd: 0.1,
	dtype: "f32",
};
