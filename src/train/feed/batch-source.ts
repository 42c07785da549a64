/** Sources of a rank's microbatches. */
import { joinImages, placeImages } from "../../data/images.ts";
import { type ImageTextMicrobatch, noText } from "../../data/microbatch.ts";
import type { LanePlace } from "../../data/routing/from-configuration.ts";
import { shareOfImages, wholeShare } from "../../data/routing/image-share.ts";
import type { SkippedTally } from "../../data/skipped-samples.ts";
import type { Topology } from "../../parallel/topology.ts";

/**
 * The part of the data that a rank reads. A lane is one of the streams of microbatches that the language model takes at
 * once.
 */
export type DataPlace = LanePlace;

/** Training microbatches. */
export interface BatchSource {
	/**
	 * This rank's microbatches of a step, counted from 1: text of its lane; images of all its lanes, in lane order.
	 * Steps are asked for in order, the first may be any.
	 */
	step(iteration: number): readonly ImageTextMicrobatch[] | Promise<readonly ImageTextMicrobatch[]>;
	/** State with which a later run goes on after the last step, as JSON; absent: the step's number is enough. */
	save?(): Promise<unknown>;
	close?(): Promise<void>;
}

/** Held-out microbatches. */
export interface EvaluationSource {
	/**
	 * This rank's part of an evaluation over `rounds` global batches; null: of the one after the training, over all that
	 * is held out. All lanes give equally many microbatches.
	 */
	microbatches(rounds: number | null): readonly ImageTextMicrobatch[] | Promise<readonly ImageTextMicrobatch[]>;
}

/** Held-out pictures to read captions of. */
export interface CaptionSource {
	/** This rank's part; all lanes give equally many microbatches. */
	prompts(): Promise<{
		/** A sample each sequence, cut where its caption begins. */
		readonly microbatches: readonly ImageTextMicrobatch[];
		/** The true captions of the sequences; empty on ranks that read no text. */
		readonly truths: readonly (readonly number[])[];
	}>;
	/** Token that ends a caption. */
	readonly endId: number;
	/** Side of a patch of the images, in pixels. */
	readonly patchSize: number;
	decode(ids: readonly number[]): string;
}

export interface RunData {
	readonly training: BatchSource;
	/** null: no data are held out. */
	readonly validation: EvaluationSource | null;
	/** Held-out bytes of a byte-level text, for their entropies; null otherwise. */
	readonly heldOutBytes: Int32Array | null;
	/** Absent or null: no captions are read. */
	readonly captions?: CaptionSource | null;
	/** Counts the samples left out that this rank tells of, evaluations' too; absent: they are not counted. */
	readonly leftOut?: SkippedTally;
}

/** The part of the data that `rank` reads. */
export function dataPlaceOf(topology: Topology, rank: number): DataPlace {
	const { encoder, language, routes } = topology;
	const laneCount = language.lanes;
	const textLane = language.contains(rank) ? language.coordinates(rank).dp : null;
	const tells = textLane !== null && rank === language.lane(textLane, 0)[0];
	const common = { textLane, laneCount, tells, wantsText: textLane !== null };
	if (!encoder?.contains(rank)) {
		return { ...common, lanes: [textLane!], share: wholeShare, tellsDamage: false, wantsImages: false };
	}
	const { dp } = encoder.coordinates(rank);
	const lanes = routes.filter(({ source }) => source === dp).map(({ destination }) => destination);
	const sources = routes.filter(({ destination }) => destination === lanes[0]).map(({ source }) => source);
	const share = { index: sources.indexOf(dp), count: sources.length };
	return { ...common, lanes, share, tellsDamage: rank === encoder.lane(dp, 0)[0], wantsImages: true };
}

/** Ranks that take the same microbatches as `rank`, ascending: one of them may read for all. */
export function readersWith(topology: Topology, rank: number): number[] {
	const keyOf = (one: number) => JSON.stringify({ ...dataPlaceOf(topology, one), tells: null, tellsDamage: null });
	const wanted = keyOf(rank);
	return Array.from({ length: topology.worldSize }, (_, one) => one).filter((one) => keyOf(one) === wanted);
}

/**
 * A rank's microbatch `index` of a step out of those of the lanes it reads: text of its own lane, its share of the images
 * of the lanes it encodes, in lane order. `firstOf`: number of a lane's first sample in the global batch. `width`: values
 * of a patch.
 */
export function ownMicrobatch(
	{ lanes, textLane, share }: DataPlace,
	read: ReadonlyMap<number, ImageTextMicrobatch>,
	index: number,
	{ firstOf, width }: { readonly firstOf: (lane: number) => number; readonly width: number },
): ImageTextMicrobatch {
	const images = joinImages(lanes.map((lane) => placeImages(read.get(lane)!.images, firstOf(lane))));
	return {
		text: textLane === null ? noText : read.get(textLane)!.text,
		images: shareOfImages(images, share, index, width),
	};
}
