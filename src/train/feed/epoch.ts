/** The length of a pass over the training data, from which --train-epochs follows. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { openIndexedText } from "../../data/megatron/from-configuration.ts";
import { openDatasets, timeoutOf } from "../../data/routing/from-configuration.ts";
import { ReadGuard } from "../../native/files.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { textSources, tokenSources } from "./sources.ts";

/**
 * Sequences of one pass. Damaged samples, and those that are left out because they are too long, count. Throws a UserError for data
 * whose length is known only after they are read.
 */
export function sequencesOfEpoch(c: TrainingConfiguration): number {
	switch (c.datasetProvider) {
		case "energon":
			return energonSequences(c);
		case "tokens":
			return tokenSources(c).training.samples;
		case "indexed": {
			using text = openIndexedText({ ...c, evalIters: 0 }, { epoch: true });
			return text.training.samples;
		}
		case "text":
			return textSources(c).training.samples;
		case "mock":
			throw unknownLength(c, "mock data are drawn, not read");
	}
}

function energonSequences(c: TrainingConfiguration): number {
	if (c.packingBufferSize !== null) {
		throw unknownLength(c, `packing-buffer-size ${c.packingBufferSize} packs samples of ${c.dataPath} into sequences`);
	}
	using _ = new ReadGuard(timeoutOf(c));
	const { mode, datasets } = openDatasets(c);
	if (mode === "weight") throw unknownLength(c, `${c.dataPath} blends data sets by weight, without an end`);
	return Math.ceil(datasets.reduce((sum, { samples, repetitions }) => sum + samples * (repetitions ?? 1), 0));
}

function unknownLength(c: TrainingConfiguration, why: string): UserError {
	return new UserError(
		`train-epochs ${c.trainEpochs}: ${why}, so the number of sequences of a pass is not known; give train-iters.`,
		exitCodes.usage,
	);
}
