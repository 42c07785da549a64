/** The data that a rank of a training run reads (docs/spec/energon.md §7.1, docs/spec/runtime.md §8). */
import { join } from "node:path";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { warn } from "../../observe/messages.ts";
import { defaultLoadOptions, loadDatasets } from "../energon/dataset.ts";
import { defaultLoaderConfiguration } from "../energon/loader/configuration.ts";
import type { LoaderOptions } from "../energon/loader/loader.ts";
import { openStorage, type StorageConfiguration } from "../energon/storage/open.ts";
import { SkippedTally } from "../skipped-samples.ts";
import { taskOf } from "../vision-language/from-configuration.ts";
import type { VisionLanguageTask } from "../vision-language/task.ts";
import { partOfEvery, type Share, turnOf, wholeShare } from "./image-share.ts";
import type { SourceOptions, SourceState } from "./source.ts";

/** The part of the data that a rank reads. */
export interface LanePlace {
	/** Lanes of the language model, ascending: those whose images it encodes, or its own where it encodes none. */
	readonly lanes: readonly number[];
	/** The lane whose text it takes; null: it takes no text. */
	readonly textLane: number | null;
	/** Lanes of the whole run. */
	readonly laneCount: number;
	/** Part of a lane's samples whose images this rank encodes, where encoder lanes share a lane. */
	readonly share: Share;
	/** Whether it counts and lists the samples left out of its text lane: of all readers of a lane's text one does. */
	readonly reportsSkipped: boolean;
	/** Whether it lists the damaged images of its share: of all ranks that decode the same images one does. */
	readonly reportsDamage: boolean;
	readonly wantsText: boolean;
	readonly wantsImages: boolean;
}

/** One process that reads everything. */
export const oneRank: LanePlace = {
	lanes: [0],
	textLane: 0,
	laneCount: 1,
	share: wholeShare,
	reportsSkipped: true,
	reportsDamage: true,
	wantsText: true,
	wantsImages: true,
};

const mebibyte = 2 ** 20;

function skippedFile({ dataSkippedFile, save }: TrainingConfiguration): string | null {
	return dataSkippedFile ?? (save === null || save.includes("://") ? null : join(save, "skipped.jsonl"));
}

/** How a run reads its data's files. */
export function storageOf(c: TrainingConfiguration): StorageConfiguration {
	return {
		cacheFolder: c.dataCacheFolder,
		cacheBytes: c.dataCacheSize * 2 ** 30,
		timeoutMilliseconds: timeoutOf(c),
		privateRedirects: c.dataPrivateRedirects,
	};
}

/** Milliseconds after which a read counts as stuck. */
export function timeoutOf({ dataTimeout }: TrainingConfiguration): number {
	return dataTimeout * 1000;
}

/**
 * The source of a rank's training microbatches, or of those it evaluates on. `unpacked`: every sample is a sequence of its
 * own length.
 */
export function sourceOptions(
	c: TrainingConfiguration,
	place: LanePlace,
	options: {
		readonly evaluation?: boolean;
		readonly unpacked?: boolean;
		readonly state?: SourceState | null;
		/** Counts the skipped samples that this rank reports. */
		readonly tally?: SkippedTally;
	} = {},
): SourceOptions {
	const { lanes, textLane, laneCount, reportsSkipped: tells, wantsText, wantsImages } = place;
	const { evaluation = false, unpacked = false, state = null, tally = new SkippedTally() } = options;
	const keep: VisionLanguageTask["keep"] = wantsText && wantsImages ? "both" : wantsText ? "text" : "images";
	const batchSize = evaluation ? c.evalMicroBatchSize : c.microBatchSize;
	const loader: Partial<LoaderOptions> = {
		threads: c.dataThreads,
		memoryBytes: c.dataMemory * mebibyte,
		decodingBytes: c.dataMemory * mebibyte,
		prefetch: c.dataPrefetch,
		onFailure: c.dataOnError,
		skipBudget: c.dataSkipBudget,
		skippedFile: tells ? skippedFile(c) : null,
		reportsSkipped: (lane) => tells && lane === textLane,
		onSkipped: (skipped) => tally.add(skipped),
		onRemark: (sentence) => tally.remark(sentence),
		onUnlisted: (sentence) => tally.onUnlisted(sentence),
		onStall: (lane, worker) => warn(`Training waits for data: worker ${worker} of data lane ${lane} is silent.`),
	};
	return {
		lanes,
		textLanes: textLane === null || lanes.includes(textLane) ? [] : [textLane],
		turn: turnOf(place.share, batchSize),
		routing: c.dataRouting,
		loader,
		...(place.reportsDamage ? { damage: { file: skippedFile(c), report: (skipped) => tally.add(skipped) } } : {}),
		state,
		configuration: {
			...defaultLoaderConfiguration,
			path: evaluation ? (c.validDataPath ?? c.dataPath!) : c.dataPath!,
			storage: storageOf(c),
			task: { ...taskOf(c), keep, share: partOfEvery(place.share, batchSize), pad: !unpacked },
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
			batchSize,
			batchDropLast: true,
			packingBufferSize: unpacked ? null : c.packingBufferSize,
			shuffleBufferSize: evaluation ? null : c.shuffleBufferSize,
		},
	};
}

/** Opens the data sets of the training, or of the evaluations, without reading a sample. Throws a UserError for a set that cannot be opened. */
export function openDatasets(c: TrainingConfiguration, options: { readonly evaluation?: boolean } = {}) {
	const { storage, path, load } = sourceOptions(c, oneRank, options).configuration;
	const own = { ...load, tokensAtOnce: c.seqLength };
	return { ...loadDatasets(openStorage(storage), path, null, own), path, part: load.splitPart };
}
