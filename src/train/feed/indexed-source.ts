/** Batches from data sets with random access (token rows, mock data): the samples of a step follow from its number alone. */
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import { UserError } from "../../system/errors.ts";
import { type BatchSource, type DataPlace, type EvaluationSource, ownMicrobatch } from "./batch-source.ts";

/** A range of consecutive samples of a lane. */
export interface SampleRange {
	readonly lane: number;
	/** Index of the range's first sample in the run's order: step by step, lane after lane. */
	readonly first: number;
	/** Index of the range's first sample among this lane's own. */
	readonly firstOfLane: number;
	readonly count: number;
}

export interface IndexedData {
	/** Text and features of a range; those that `wants` does not name may be absent. */
	microbatch(range: SampleRange, wants: Pick<DataPlace, "wantsText" | "features">): ImageTextMicrobatch;
}

/**
 * How the samples of a step are dealt to lanes: `ranges`, to each lane an equal range of them; `turns`, to each lane in turn a
 * microbatch, as Megatron's samplers do (megatron/training/datasets/data_samplers.py).
 */
export type Dealing = "ranges" | "turns";

/** Training on the samples of a data set in order. */
export function indexedTraining(
	c: TrainingConfiguration,
	place: DataPlace,
	data: IndexedData,
	dealing: Dealing = "ranges",
): BatchSource {
	const perLane = c.globalBatchSize / place.laneCount;
	return {
		step: (iteration) =>
			dealt(place, data, dealing, { taken: (iteration - 1) * perLane, perLane, size: c.microBatchSize }),
	};
}

/** Microbatches of `size` samples for a rank: the next `perLane` samples of each lane, after the `taken` before. */
function dealt(
	place: DataPlace,
	data: IndexedData,
	dealing: Dealing,
	{ taken, perLane, size }: { readonly taken: number; readonly perLane: number; readonly size: number },
): ImageTextMicrobatch[] {
	const { laneCount } = place;
	return Array.from({ length: perLane / size }, (_, index) =>
		ownPart(place, data, index, (lane) => {
			const number = dealing === "turns" ? (index * laneCount + lane) * size : lane * perLane + index * size;
			const range = { lane, first: taken * laneCount + number, firstOfLane: taken + index * size, count: size };
			return { range, number };
		}),
	);
}

/**
 * Evaluations over the same first samples of `samples` every time, split into one range a lane. Without an encoder a lane's last
 * microbatches may be short or empty; with one all are full, and left-over samples are dropped.
 */
export function indexedEvaluation(
	c: TrainingConfiguration,
	place: DataPlace,
	data: IndexedData,
	held: { readonly samples: number; readonly whole: boolean },
): EvaluationSource {
	const size = c.evalMicroBatchSize;
	const round = size * place.laneCount;
	return {
		microbatches: (rounds) => {
			const wanted = rounds === null ? held.samples : Math.min(held.samples, rounds * c.evalGlobalBatchSize);
			const samples = held.whole ? wanted - (wanted % round) : wanted;
			if (samples === 0) {
				throw new UserError(
					`${held.samples} held-out samples are fewer than one evaluation microbatch of every data lane (${round}).`,
				);
			}
			const perLane = Math.ceil(samples / round);
			return Array.from({ length: perLane }, (_, index) =>
				ownPart(place, data, index, (lane) => {
					const first = (lane * perLane + index) * size;
					const count = Math.max(0, Math.min(size, samples - first));
					return { range: { lane, first, firstOfLane: index * size, count }, number: first };
				}),
			);
		},
	};
}

/**
 * Evaluations that each continue where the one before stopped; the final one has eval-iters rounds too. `consumed`: samples that
 * earlier evaluations have used.
 */
export function endlessEvaluation(
	c: TrainingConfiguration,
	place: DataPlace,
	data: IndexedData,
	consumed: number,
	dealing: Dealing = "ranges",
): EvaluationSource {
	let taken = consumed / place.laneCount;
	return {
		microbatches: (rounds) => {
			const perLane = ((rounds ?? c.evalIters) * c.evalGlobalBatchSize) / place.laneCount;
			const microbatches = dealt(place, data, dealing, { taken, perLane, size: c.evalMicroBatchSize });
			taken += perLane;
			return microbatches;
		},
	};
}

/** Microbatch `index` of a rank. `number`: index of its first sample in the global batch. */
function ownPart(
	place: DataPlace,
	data: IndexedData,
	index: number,
	rangeOf: (lane: number) => { readonly range: SampleRange; readonly number: number },
): ImageTextMicrobatch {
	const { textLane } = place;
	const served = Object.entries(place.features);
	const lanes = new Set([...(textLane === null ? [] : [textLane]), ...served.flatMap(([, { lanes }]) => lanes)]);
	const read = new Map(
		Array.from(lanes, (lane) => {
			const features = Object.fromEntries(served.filter(([, own]) => own.lanes.includes(lane)));
			return [lane, data.microbatch(rangeOf(lane).range, { wantsText: lane === textLane, features })] as const;
		}),
	);
	return ownMicrobatch(place, read, index, (lane) => rangeOf(lane).number);
}
