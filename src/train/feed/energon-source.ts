/** Batches from Energon data. Each rank reads its lanes; after each step all ranks compare the samples that they have read. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { checkDatasets } from "../../data/check.ts";
import { joinImages } from "../../data/images.ts";
import { type ImageTextMicrobatch, joinTexts } from "../../data/microbatch.ts";
import { leaveOut } from "../../data/routing/agreement.ts";
import { sourceOptions } from "../../data/routing/from-configuration.ts";
import { partOfEvery, wholeShare } from "../../data/routing/image-share.ts";
import { EnergonSource, mergeStates } from "../../data/routing/source.ts";
import { SkippedTally } from "../../data/skipped-samples.ts";
import { configuredTokenizer } from "../../data/text/configured-tokenizer.ts";
import type { ImageTextBatch } from "../../data/vision-language/batch.ts";
import { captionPrompts } from "../../data/vision-language/prompt.ts";
import { visionModule } from "../../parallel/index.ts";
import {
	type BatchSource,
	type CaptionSource,
	type DataPlace,
	type EvaluationSource,
	ownMicrobatch,
	type RunData,
} from "./batch-source.ts";
import type { DataOptions } from "./sources.ts";

export async function energonSources(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
): Promise<RunData> {
	// Evaluations open their data when they run; mistakes in it are to be found before the first step.
	if (options.lane.reads && (c.evalIters > 0 || c.evalCaptions > 0)) checkDatasets(c, { evaluation: true });
	const tally = new SkippedTally(options.onUnlisted);
	return {
		training: await energonTraining(c, place, options, tally),
		validation: c.evalIters > 0 ? energonEvaluation(c, place, options, tally) : null,
		heldOutBytes: null,
		captions: c.evalCaptions === 0 ? null : energonCaptions(c, place, options, tally),
		skipped: tally,
	};
}

async function energonTraining(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
): Promise<BatchSource> {
	const state = options.states && mergeStates(options.states);
	const source = options.lane.reads ? await EnergonSource.open(sourceOptions(c, place, { state, tally })) : null;
	const batch = { perLane: c.globalBatchSize / place.laneCount, size: c.microBatchSize };
	return {
		step: (iteration) => take(source, place, options, { ...batch, iteration }),
		save: async () => (await source?.save()) ?? null,
		close: async () => await source?.[Symbol.asyncDispose](),
	};
}

/** Evaluations that all look at the same first samples; the one after the training has eval-iters rounds too. */
function energonEvaluation(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
): EvaluationSource {
	return {
		microbatches: async (rounds) => {
			const perLane = ((rounds ?? c.evalIters) * c.evalGlobalBatchSize) / place.laneCount;
			await using source = options.lane.reads
				? await EnergonSource.open(sourceOptions(c, place, { evaluation: true, tally }))
				: null;
			return await take(source, place, options, { perLane, size: c.evalMicroBatchSize, iteration: 0 });
		},
	};
}

/**
 * The first samples of every lane, in microbatches of `eval-micro-batch-size` of them and a last one of those that remain. A
 * sample that comes again, as where a data worker has read all of its own, counts once.
 */
export async function energonSamplesOnce(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
	perLane: number,
): Promise<readonly ImageTextMicrobatch[]> {
	// A data worker that has read all of its own leaves samples over where it makes batches of several.
	const one = { ...c, evalMicroBatchSize: 1, packingBufferSize: null };
	await using source = options.lane.reads
		? await EnergonSource.open(sourceOptions(one, place, { evaluation: true, tally }))
		: null;
	const together = c.evalMicroBatchSize;
	return await take(source, place, options, { perLane, size: 1, together, iteration: 0, counted: new Set() });
}

/** The first `eval-captions` samples of the validation data, a sequence each. */
function energonCaptions(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
): CaptionSource {
	const tokenizer = configuredTokenizer(c);
	const endId = c.dataEndId!;
	return {
		endId,
		microbatchSize: c.evalMicroBatchSize,
		patchSize: c.patchDim,
		statistics: { mean: c.imageMean, deviation: c.imageStd },
		isMarkup: (id) => id === c.imageTokenId || tokenizer.addedText(id) !== null,
		decode: (ids) => tokenizer.decode(ids.map((id) => (id < tokenizer.vocabularySize ? id : 0))),
		prompts: async () => {
			const size = c.evalMicroBatchSize;
			const perLane = size * Math.floor(c.evalCaptions / (size * place.laneCount));
			await using source = options.lane.reads
				? await EnergonSource.open(sourceOptions(c, place, { evaluation: true, unpacked: true, tally }))
				: null;
			const microbatches = await take(source, place, options, { perLane, size, iteration: 0 });
			if (!place.wantsText) return { microbatches, truths: [] };
			const cut = microbatches.map(({ text }) => captionPrompts(text, endId));
			return {
				microbatches: microbatches.map(({ features }, i) => ({ features, text: cut[i]!.prompts })),
				truths: cut.flatMap(({ truths }) => truths),
			};
		},
	};
}

interface Amount {
	/** Samples of each lane. */
	readonly perLane: number;
	/** Samples of a batch that the source makes. */
	readonly size: number;
	/** Batches that are joined to one microbatch; the last microbatch may have fewer. Absent: 1. */
	readonly together?: number;
	/** Step that the samples are for, in messages. */
	readonly iteration: number;
	/** Names of the samples that count, each of them once; null or absent: samples count each time. */
	readonly counted?: Set<string> | null;
}

/** This rank's next microbatches. Collective over the run. `source`: null if another rank of the lane reads. */
async function take(
	source: EnergonSource | null,
	place: DataPlace,
	{ world, lane }: DataOptions,
	{ perLane, size, together = 1, iteration, counted = null }: Amount,
): Promise<readonly ImageTextMicrobatch[]> {
	const { laneCount, textLane } = place;
	const read: ReadonlyMap<number, ImageTextBatch>[] = [];
	while (source !== null && read.length < perLane / size) read.push(await source.next());
	const exchange = (values: Int32Array) => world.exchange(values);
	if (source === null) {
		EnergonSource.compareNothing(exchange, laneCount);
	} else {
		for (const { lane: number, microbatch, sample } of source.compare(exchange, iteration).damaged) {
			const own = number === textLane ? read[microbatch]?.get(number) : undefined;
			if (own !== undefined) leaveOut(own.text, own.spans[sample]!);
		}
	}
	for (const lanes of read) {
		const own = textLane === null ? undefined : lanes.get(textLane);
		for (const [sample, name] of (counted && own ? own.names : []).entries()) {
			if (counted!.has(name)) leaveOut(own!.text, own!.spans[sample]!);
			else counted!.add(name);
		}
	}
	// If the share is equal for all microbatches, the data threads have decoded only that.
	const decoded = partOfEvery(place.share, size);
	const share = decoded.count === 1 ? place.share : wholeShare;
	const rest = { textLane, features: place.wantsImages ? { [visionModule]: { lanes: place.lanes, share } } : {} };
	const groups = Array.from({ length: Math.ceil(read.length / together) }, (_, i) =>
		joinBatches(read.slice(i * together, (i + 1) * together)),
	);
	const microbatches = groups.map((lanes, index) => {
		const within = index * together * size + (decoded.index * size) / decoded.count;
		return ownMicrobatch(rest, lanes, index, (number) => number * perLane + within);
	});
	return lane.share(source && microbatches);
}

/** Batches of every lane as one, sample after sample. */
function joinBatches(batches: readonly ReadonlyMap<number, ImageTextBatch>[]): Map<number, ImageTextMicrobatch> {
	return new Map(
		[...batches[0]!.keys()].map((lane) => {
			const own = batches.map((lanes) => lanes.get(lane)!);
			const features = { [visionModule]: joinImages(own.map((one) => one.images)) };
			return [lane, { text: joinTexts(own.map(({ text }) => text)), features }];
		}),
	);
}
