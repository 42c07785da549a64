/** Where a rank's microbatches come from. */
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { LanePlace } from "../../data/routing/from-configuration.ts";
import { wholeShare } from "../../data/routing/share.ts";
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
	/** Samples that this rank could not read and left out so far; absent: it leaves none out. */
	skipped?(): number;
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
}

/** The part of the data that `rank` reads. */
export function dataPlaceOf(topology: Topology, rank: number): DataPlace {
	const { encoder, language, routes } = topology;
	const laneCount = language.lanes;
	const textLane = language.contains(rank) ? language.coordinates(rank).dp : null;
	if (!encoder?.contains(rank)) {
		return { lanes: [textLane!], textLane, laneCount, share: wholeShare, wantsText: true, wantsImages: false };
	}
	const { dp } = encoder.coordinates(rank);
	const lanes = routes.filter(({ source }) => source === dp).map(({ destination }) => destination);
	const sources = routes.filter(({ destination }) => destination === lanes[0]).map(({ source }) => source);
	const share = { index: sources.indexOf(dp), count: sources.length };
	return { lanes, textLane, laneCount, share, wantsText: textLane !== null, wantsImages: true };
}
