/** Batches from Energon data. Each rank reads its lanes; after each step all ranks compare the samples that they have read. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import { checkDatasets } from "../../data/check.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import { leaveOut } from "../../data/routing/damaged-samples.ts";
import { sourceOptions } from "../../data/routing/from-configuration.ts";
import { partOfEvery, turnOf } from "../../data/routing/image-share.ts";
import { EnergonSource, mergeStates } from "../../data/routing/source.ts";
import { SkippedTally } from "../../data/skipped-samples.ts";
import { byteTokenizer, openTokenizer } from "../../data/text/tokenizer.ts";
import type { ImageTextBatch } from "../../data/vision-language/batch.ts";
import { captionPrompts } from "../../data/vision-language/caption-prompts.ts";
import { patchWidth } from "../../models/radio/config.ts";
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
	const width = patchWidth({ patchSize: c.patchDim });
	const batch = { perLane: c.globalBatchSize / place.laneCount, size: c.microBatchSize, width };
	return {
		step: (iteration) => take(source, place, options, { ...batch, iteration }),
		save: async () => (await source?.save()) ?? null,
		close: async () => await source?.[Symbol.asyncDispose](),
	};
}

/**
 * Evaluations that all look at the same first samples; the one after the training has eval-iters rounds too. `repeats`:
 * whether a sample that comes again, as where a data worker has read all of its own, counts in the loss again.
 */
export function energonEvaluation(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
	repeats: "counted" | "left out" = "counted",
): EvaluationSource {
	return {
		microbatches: async (rounds) => {
			const perLane = ((rounds ?? c.evalIters) * c.evalGlobalBatchSize) / place.laneCount;
			await using source = options.lane.reads
				? await EnergonSource.open(sourceOptions(c, place, { evaluation: true, tally }))
				: null;
			const width = patchWidth({ patchSize: c.patchDim });
			const counted = repeats === "left out" ? new Set<string>() : null;
			return await take(source, place, options, { perLane, size: c.evalMicroBatchSize, iteration: 0, width, counted });
		},
	};
}

/** The first `eval-captions` samples of the validation data, a sequence each. */
function energonCaptions(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
	tally: SkippedTally,
): CaptionSource {
	const tokenizer = c.tokenizer === null ? byteTokenizer : openTokenizer(c.tokenizer);
	const endId = c.dataEndId!;
	return {
		endId,
		patchSize: c.patchDim,
		decode: (ids) => tokenizer.decode(ids.map((id) => (id < tokenizer.vocabularySize ? id : 0))),
		prompts: async () => {
			const size = c.evalMicroBatchSize;
			const perLane = size * Math.floor(c.evalCaptions / (size * place.laneCount));
			await using source = options.lane.reads
				? await EnergonSource.open(sourceOptions(c, place, { evaluation: true, unpacked: true, tally }))
				: null;
			const width = patchWidth({ patchSize: c.patchDim });
			const microbatches = await take(source, place, options, { perLane, size, iteration: 0, width });
			if (!place.wantsText) return { microbatches, truths: [] };
			const cut = microbatches.map(({ text }) => captionPrompts(text, endId));
			return {
				microbatches: microbatches.map(({ images }, i) => ({ images, text: cut[i]!.prompts })),
				truths: cut.flatMap(({ truths }) => truths),
			};
		},
	};
}

interface Amount {
	/** Samples of each lane. */
	readonly perLane: number;
	/** Samples of a microbatch. */
	readonly size: number;
	/** Step that the samples are for, in messages. */
	readonly iteration: number;
	/** Values of a patch. */
	readonly width: number;
	/** Names of the samples that count, each of them once; null or absent: samples count each time. */
	readonly counted?: Set<string> | null;
}

/** This rank's next microbatches. Collective over the run. `source`: null if another rank of the lane reads. */
async function take(
	source: EnergonSource | null,
	place: DataPlace,
	{ world, lane }: DataOptions,
	{ perLane, size, iteration, width, counted = null }: Amount,
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
	const rest = { ...place, share: turnOf(place.share, size) };
	const microbatches = read.map((lanes, index) => {
		const within = index * size + (decoded.index * size) / decoded.count;
		return ownMicrobatch(rest, lanes, index, { firstOf: (number) => number * perLane + within, width });
	});
	return lane.share(source && microbatches);
}
