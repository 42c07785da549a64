/** Host memory that reading Energon data takes at least, compared with the host's before threads start and buffers fill. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { openIndexedText } from "../../data/megatron/from-configuration.ts";
import { openDatasets, timeoutOf } from "../../data/routing/from-configuration.ts";
import { ReadGuard } from "../../native/files.ts";
import { bytesText } from "../../observe/output.ts";
import type { Topology } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { dataPlaceOf, readersWith } from "./batch-source.ts";
import { textSources, tokenSources } from "./sources.ts";

/** Bytes of a thread with an open data set: 11 to 12 MiB are measured with one of 600 samples. */
const threadBytes = 11 * 2 ** 20;
/** Bytes of a sample that waits in a buffer, its pictures not counted: 3.5 KiB are measured of captions of a few words. */
const sampleBytes = 3 * 2 ** 10;
/** Data threads a core above which a warning names them: they decode pictures, and wait for each other and for disks beside. */
const manyThreads = 8;

export interface Host {
	/** Bytes. */
	readonly memory: number;
	readonly cores: number;
}

/**
 * Throws a UserError where the data of these ranks, all of one host, need more memory than it has. Returns a warning where they start
 * far more threads than the host has cores; null: they do not.
 */
export function requireDataRoom(
	c: TrainingConfiguration,
	topology: Topology,
	ranks: readonly number[],
	{ memory, cores }: Host,
): string | null {
	if (c.datasetProvider !== "energon") return null;
	let [workers, threads] = [0, 0];
	for (const rank of ranks) {
		// Of ranks that take the same microbatches the first reads.
		if (readersWith(topology, rank)[0] !== rank) continue;
		const { lanes, textLane } = dataPlaceOf(topology, rank);
		const read = lanes.length + (textLane === null || lanes.includes(textLane) ? 0 : 1);
		const ofLane = Math.max(1, c.numWorkers);
		const most = c.dataThreads ?? Number.POSITIVE_INFINITY;
		workers += read * ofLane;
		threads += c.dataRouting === "routed" ? Math.min(most, read * ofLane) : read * Math.min(most, ofLane);
	}
	const buffered = (c.packingBufferSize ?? 0) + (c.shuffleBufferSize ?? 0);
	const needed = threads * threadBytes + workers * buffered * sampleBytes;
	const buffers =
		buffered === 0 ? "" : ` and ${counted(workers, "worker")} that buffer ${counted(buffered, "sample")} each`;
	if (needed > memory) {
		throw new UserError(
			`The data of this host's ranks need at least ${bytesText(needed)} of memory, for ${counted(threads, "thread")}${buffers}; it has ${bytesText(memory)}. num-workers, data-threads, packing-buffer-size and shuffle-buffer-size set them.`,
			exitCodes.usage,
		);
	}
	if (threads <= manyThreads * cores) return null;
	return `num-workers ${c.numWorkers}: this host's ranks start ${counted(threads, "data thread")} for ${counted(cores, "core")}, which take ${bytesText(threads * threadBytes)} of memory; with data-threads fewer threads run the same workers.`;
}

// The length of a pass over the training data, from which --train-epochs follows.

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
