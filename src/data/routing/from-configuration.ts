/** What a rank of a training run reads (spec energon.md §7.1, runtime.md §8). */
import { dataLanes, hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { defaultLoadOptions } from "../energon/dataset.ts";
import { defaultLoaderConfiguration } from "../energon/loader/configuration.ts";
import type { LoaderOptions } from "../energon/loader/loader.ts";
import { taskOf } from "../vision-language/from-configuration.ts";
import type { VisionLanguageTask } from "../vision-language/task.ts";
import { type Share, wholeShare } from "./merge.ts";
import type { SourceOptions, SourceState } from "./source.ts";

/** A rank as the data see it: the module it runs and its data-parallel place there. */
export interface DataPlace {
	readonly module: "encoder" | "language" | "both";
	readonly lane: number;
}

/** Lanes of the language model that a rank reads, and its part of their images. */
export function lanesOf(
	{ module, lane }: DataPlace,
	encoderLanes: number,
	languageLanes: number,
): { readonly lanes: readonly number[]; readonly share: Share } {
	if (module !== "encoder") return { lanes: [lane], share: wholeShare };
	if (encoderLanes <= languageLanes) {
		const perRank = languageLanes / encoderLanes;
		return { lanes: Array.from({ length: perRank }, (_, i) => lane * perRank + i), share: wholeShare };
	}
	const count = encoderLanes / languageLanes;
	return { lanes: [Math.floor(lane / count)], share: { index: lane % count, count } };
}

const mebibyte = 2 ** 20;

/** The source of a rank's training microbatches, or of those it evaluates on. */
export function sourceOptions(
	c: TrainingConfiguration,
	place: DataPlace,
	options: { readonly evaluation?: boolean; readonly state?: SourceState | null } = {},
): SourceOptions {
	const { evaluation = false, state = null } = options;
	const languageLanes = dataLanes(c);
	const { lanes, share } = lanesOf(place, hasEncoder(c) ? c.encoderDp : languageLanes, languageLanes);
	const keep: VisionLanguageTask["keep"] =
		place.module === "encoder" ? "images" : place.module === "language" ? "text" : "both";
	const loader: Partial<LoaderOptions> = {
		threads: c.dataThreads,
		memoryBytes: c.dataMemory * mebibyte,
		prefetch: c.dataPrefetch,
		onFailure: c.dataOnError,
		skipBudget: c.dataSkipBudget,
		skippedFile: c.dataSkippedFile,
	};
	return {
		lanes,
		routing: c.dataRouting,
		loader,
		state,
		configuration: {
			...defaultLoaderConfiguration,
			path: evaluation ? (c.validDataPath ?? c.dataPath!) : c.dataPath!,
			storage: { cacheFolder: c.dataCacheFolder, cacheBytes: c.dataCacheSize * 2 ** 30 },
			task: { ...taskOf(c), keep, share },
			load: {
				...defaultLoadOptions,
				training: !evaluation,
				splitPart: evaluation ? c.validDataSplitPart : c.dataSplitPart,
				maxSamplesPerSequence: c.maxSamplesPerSequence,
				parallelShardIters: evaluation ? null : c.parallelShardIters,
			},
			worldSize: languageLanes,
			numWorkers: c.numWorkers,
			seedOffset: c.dataSeedOffset,
			batchSize: evaluation ? c.evalMicroBatchSize : c.microBatchSize,
			batchDropLast: true,
			packingBufferSize: c.packingBufferSize,
			shuffleBufferSize: evaluation ? null : c.shuffleBufferSize,
		},
	};
}
