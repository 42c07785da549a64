/** Projectors, layers of the tower that make rows of their own, and positions of pictures in the text. */
import { type Check, unless } from "./check.ts";

const ascendBelow = (layers: readonly number[], end: number) =>
	layers.every((layer, at) => layer > (layers[at - 1] ?? -1) && layer < end);

export const visionChecks: readonly Check[] = [
	(c) =>
		unless(
			!c.visionProjectionNorm || c.visionProjectionType === "mlp",
			"vision-projection-norm",
			"allowed only with vision-projection-type mlp",
		),
	(c) =>
		unless(
			!c.visionProjectionStem ||
				(c.visionProjectionType === "mlp" && !c.visionProjectionNorm && c.deepstackVisualIndexes === null),
			"vision-projection-stem",
			"allowed only with vision-projection-type mlp, without vision-projection-norm and deepstack-visual-indexes",
		),
	(c) =>
		unless(
			ascendBelow(c.deepstackVisualIndexes ?? [], c.visionNumLayers) &&
				(c.deepstackVisualIndexes === null || c.visionProjectionType === "mlp"),
			"deepstack-visual-indexes",
			`allowed with vision-projection-type mlp is an ascending list of layers below vision-num-layers (${c.visionNumLayers})`,
		),
	(c) =>
		unless(
			ascendBelow(c.visionFeatureLayers ?? [], c.visionNumLayers - 1) &&
				(c.visionFeatureLayers === null || (c.deepstackVisualIndexes === null && !c.pixelShuffle)),
			"vision-feature-layers",
			`allowed without deepstack-visual-indexes and pixel-shuffle is an ascending list of layers before the last of vision-num-layers (${c.visionNumLayers})`,
		),
	(c) => {
		const pairs = Math.floor(c.kvChannels * c.rotaryPercent) / 2;
		const sum = c.mropeSection?.reduce((all, count) => all + count, 0);
		return unless(
			c.mropeSection === null ||
				(c.mropeSection.length === 3 && sum === pairs && c.positionEmbeddingType === "rope" && !c.rotaryInterleaved),
			"mrope-section",
			`allowed with position-embedding-type rope are three numbers, of time, row and column, that sum to the ${pairs} frequencies of a head`,
		);
	},
];
