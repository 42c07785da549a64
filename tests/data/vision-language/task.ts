/** A small vision-language task for tests. */
import { type VisionLanguageTask, visionLanguageDefaults } from "../../../src/data/vision-language/task.ts";
import { clipStatistics } from "../../../src/native/images.ts";

export const smallTask: VisionLanguageTask = {
	...visionLanguageDefaults,
	sequenceLength: 96,
	imageTokenId: 300,
	endId: 10,
	sizing: { mode: "dynamic", minPatches: 4, maxPatches: 64, minSide: 0 },
	tower: { patchSize: 16, pixelShuffle: true, dropClassTokens: true, classTokens: 0 },
	statistics: clipStatistics,
};
