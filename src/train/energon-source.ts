/** Batches out of Energon data: every rank reads its lanes, and all compare each step what they have read. */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { sourceOptions } from "../data/routing/from-configuration.ts";
import { EnergonSource, mergeStates } from "../data/routing/source.ts";
import { byteTokenizer, openTokenizer } from "../data/text/tokenizer.ts";
import { captionPrompts } from "../data/vision-language/caption-prompts.ts";
import type { BatchSource, CaptionSource, DataPlace, EvaluationSource, RunData } from "./batch-source.ts";
import type { DataOptions } from "./sources.ts";

export async function energonSources(
	c: TrainingConfiguration,
	place: DataPlace,
	options: DataOptions,
): Promise<RunData> {
	return {
		training: await energonTraining(c, place, options),
		validation: c.evalIters > 0 ? energonEvaluation(c, place, options) : null,
		heldOutBytes: null,
		captions: c.evalCaptions === 0 ? null : energonCaptions(c, place, options),
	};
}

async function energonTraining(
	c: TrainingConfiguration,
	place: DataPlace,
	{ world, states }: DataOptions,
): Promise<BatchSource> {
	const state = states && mergeStates(states);
	const source = await EnergonSource.open(sourceOptions(c, place, { state }));
	const take = taker(source, place, { perLane: c.globalBatchSize / place.laneCount, size: c.microBatchSize });
	return {
		step: async (iteration) => {
			const microbatches = await take();
			source.compare((values) => world.exchange(values), iteration);
			return microbatches;
		},
		save: () => source.save(),
		skipped: () => source.skipped,
		close: () => source[Symbol.asyncDispose](),
	};
}

/** Evaluations that all look at the same first samples; the one after the training has eval-iters rounds too. */
function energonEvaluation(c: TrainingConfiguration, place: DataPlace, { world }: DataOptions): EvaluationSource {
	return {
		microbatches: async (rounds) => {
			await using source = await EnergonSource.open(sourceOptions(c, place, { evaluation: true }));
			const perLane = ((rounds ?? c.evalIters) * c.evalGlobalBatchSize) / place.laneCount;
			const microbatches = await taker(source, place, { perLane, size: c.evalMicroBatchSize })();
			source.compare((values) => world.exchange(values), 0);
			return microbatches;
		},
	};
}

/** The first `eval-captions` samples of an evaluation, each a sequence of its own. */
function energonCaptions(c: TrainingConfiguration, place: DataPlace, { world }: DataOptions): CaptionSource {
	const tokenizer = c.tokenizer === null ? byteTokenizer : openTokenizer(c.tokenizer);
	const endId = c.dataEndId!;
	return {
		endId,
		patchSize: c.patchDim,
		decode: (ids) => tokenizer.decode(ids.map((id) => (id < tokenizer.vocabularySize ? id : 0))),
		prompts: async () => {
			await using source = await EnergonSource.open(sourceOptions(c, place, { evaluation: true, unpacked: true }));
			const size = c.evalMicroBatchSize;
			const perLane = size * Math.floor(c.evalCaptions / (size * place.laneCount));
			const microbatches = await taker(source, place, { perLane, size })();
			source.compare((values) => world.exchange(values), 0);
			if (!place.wantsText) return { microbatches, truths: [] };
			const cut = microbatches.map(({ text }) => captionPrompts(text, endId));
			return {
				microbatches: microbatches.map(({ images }, i) => ({ images, text: cut[i]!.prompts })),
				truths: cut.flatMap(({ truths }) => truths),
			};
		},
	};
}

/** Takes the microbatches of `perLane` samples of every lane, `size` each. */
function taker(
	source: EnergonSource,
	{ share }: DataPlace,
	batch: { readonly perLane: number; readonly size: number },
) {
	const { perLane, size } = batch;
	return async (): Promise<ImageTextMicrobatch[]> => {
		const microbatches: ImageTextMicrobatch[] = [];
		for (let done = 0; done < perLane; done += size) {
			const within = done + (share.index * size) / share.count;
			microbatches.push(await source.next((lane) => lane * perLane + within));
		}
		return microbatches;
	};
}
