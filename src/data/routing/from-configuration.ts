/** The data that a rank of a training run reads (docs/spec/energon.md §7.1, docs/spec/runtime.md §8). */
import { join } from "node:path";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { warn } from "../../observe/messages.ts";
import { defaultLoadOptions } from "../energon/dataset.ts";
import { defaultLoaderConfiguration } from "../energon/loader/configuration.ts";
import type { LoaderOptions } from "../energon/loader/loader.ts";
import type { SkippedSample } from "../energon/loader/messages.ts";
import { taskOf } from "../vision-language/from-configuration.ts";
import type { VisionLanguageTask } from "../vision-language/task.ts";
import { type Share, wholeShare } from "./share.ts";
import type { SourceOptions, SourceState } from "./source.ts";

/** The part of the data that a rank reads. */
export interface LanePlace {
	/** Lanes of the language model, ascending: those whose images it encodes, or its own where it encodes none. */
	readonly lanes: readonly number[];
	/** The lane whose text it takes; null: it takes no text. */
	readonly textLane: number | null;
	/** Lanes of the whole run. */
	readonly laneCount: number;
	/** Part of a lane's samples whose images this rank encodes, where encoder ranks share a lane. */
	readonly share: Share;
	readonly wantsText: boolean;
	readonly wantsImages: boolean;
}

/** One process that reads everything. */
export const oneRank: LanePlace = {
	lanes: [0],
	textLane: 0,
	laneCount: 1,
	share: wholeShare,
	wantsText: true,
	wantsImages: true,
};

const mebibyte = 2 ** 20;

function skippedFile({ dataSkippedFile, save }: TrainingConfiguration): string | null {
	return dataSkippedFile ?? (save === null ? null : join(save, "skipped.jsonl"));
}

/** Says of the first, tenth, hundredth … sample that was left out why. */
function tellSkipped({ reason, samples }: SkippedSample, count: number): void {
	const before = count - Math.max(1, samples.length);
	const power = 10 ** Math.floor(Math.log10(count));
	if (before < power)
		warn(`${count} ${count === 1 ? "sample was" : "samples were"} left out, the last because: ${reason}`);
}

/**
 * The source of a rank's training microbatches, or of those it evaluates on. `unpacked`: every sample is a sequence of its
 * own length.
 */
export function sourceOptions(
	c: TrainingConfiguration,
	{ lanes, laneCount, share, wantsText, wantsImages }: LanePlace,
	options: { readonly evaluation?: boolean; readonly unpacked?: boolean; readonly state?: SourceState | null } = {},
): SourceOptions {
	const { evaluation = false, unpacked = false, state = null } = options;
	const keep: VisionLanguageTask["keep"] = wantsText && wantsImages ? "both" : wantsText ? "text" : "images";
	const loader: Partial<LoaderOptions> = {
		threads: c.dataThreads,
		memoryBytes: c.dataMemory * mebibyte,
		prefetch: c.dataPrefetch,
		onFailure: c.dataOnError,
		skipBudget: c.dataSkipBudget,
		// Encoder ranks leave out the same samples.
		skippedFile: wantsText ? skippedFile(c) : null,
		...(wantsText ? { onSkipped: tellSkipped } : {}),
		onStall: (lane, worker) => warn(`Training waits for data: worker ${worker} of data lane ${lane} is silent.`),
	};
	return {
		lanes,
		routing: c.dataRouting,
		loader,
		...(wantsImages ? { damage: { file: skippedFile(c), tell: tellSkipped } } : {}),
		state,
		configuration: {
			...defaultLoaderConfiguration,
			path: evaluation ? (c.validDataPath ?? c.dataPath!) : c.dataPath!,
			storage: { cacheFolder: c.dataCacheFolder, cacheBytes: c.dataCacheSize * 2 ** 30 },
			task: { ...taskOf(c), keep, share, pad: !unpacked },
			load: {
				...defaultLoadOptions,
				training: !evaluation,
				splitPart: evaluation ? c.validDataSplitPart : c.dataSplitPart,
				maxSamplesPerSequence: c.maxSamplesPerSequence,
				parallelShardIters: evaluation ? null : c.parallelShardIters,
			},
			worldSize: laneCount,
			numWorkers: c.numWorkers,
			seedOffset: c.dataSeedOffset,
			batchSize: evaluation ? c.evalMicroBatchSize : c.microBatchSize,
			batchDropLast: true,
			packingBufferSize: unpacked ? null : c.packingBufferSize,
			shuffleBufferSize: evaluation ? null : c.shuffleBufferSize,
		},
	};
}
