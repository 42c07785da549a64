/** The interfaces of a rank's data: training, evaluation and captioning. */
import { joinImages, placeImages } from "../../data/images.ts";
import { type ImageTextMicrobatch, noText } from "../../data/microbatch.ts";
import type { LanePlace } from "../../data/routing/from-configuration.ts";
import { type Share, shareOfImages, wholeShare } from "../../data/routing/image-share.ts";
import type { SkippedTally } from "../../data/skipped-samples.ts";
import type { ChannelStatistics } from "../../native/images.ts";
import { type Topology, visionModule } from "../../parallel/index.ts";

/** The part of the data that a rank reads. A lane is a data-parallel rank of the language model: a stream of microbatches. */
export interface DataPlace extends LanePlace {
	/** Lanes whose items each encoder of the rank encodes, ascending, and its part of them where encoder lanes share a lane. */
	readonly features: Readonly<Record<string, { readonly lanes: readonly number[]; readonly share: Share }>>;
}

/** Training microbatches. */
export interface BatchSource {
	/**
	 * This rank's microbatches of a step (from 1): the text of its lane, and the images of all its lanes in lane order. Steps are
	 * requested in order, from any first step.
	 */
	step(iteration: number): readonly ImageTextMicrobatch[] | Promise<readonly ImageTextMicrobatch[]>;
	/** State to resume from after the last step, as JSON; absent: the step's number is enough. */
	save?(): Promise<unknown>;
	close?(): Promise<void>;
}

/** Held-out microbatches. */
export interface EvaluationSource {
	/**
	 * This rank's part of an evaluation over `rounds` global batches; null: of the final evaluation, over all held-out data.
	 * Every lane returns the same number of microbatches.
	 */
	microbatches(rounds: number | null): readonly ImageTextMicrobatch[] | Promise<readonly ImageTextMicrobatch[]>;
}

/** Held-out pictures to be captioned (--eval-captions). */
export interface CaptionSource {
	/** This rank's part; every lane returns the same number of microbatches. */
	prompts(): Promise<{
		/** One sample a sequence, cut where its caption begins. */
		readonly microbatches: readonly ImageTextMicrobatch[];
		/** Token ids of the true captions, a list a sequence; empty on ranks that read no text. */
		readonly truths: readonly (readonly number[])[];
	}>;
	/** Id of the token that ends a caption. */
	readonly endId: number;
	/** Samples of a microbatch of a lane. */
	readonly microbatchSize: number;
	/** Side of a patch of the images, in pixels, and the statistics that they are normalised by. */
	readonly patchSize: number;
	readonly statistics: ChannelStatistics;
	/** Whether an id stands for no text: an image's row, or a special token. */
	isMarkup(id: number): boolean;
	decode(ids: readonly number[]): string;
}

export interface RunData {
	readonly training: BatchSource;
	/** null: the configuration holds out no data. */
	readonly validation: EvaluationSource | null;
	/** Data of the evaluation that follows the training; null or absent: the configuration names no test data. */
	readonly test?: EvaluationSource | null;
	/** Held-out bytes of a byte-level text, for its entropies; null for other data. */
	readonly heldOutBytes: Int32Array | null;
	/** Absent or null: no pictures are captioned. */
	readonly captions?: CaptionSource | null;
	/** Counts the skipped samples that this rank reports, those of evaluations included; absent: they are not counted. */
	readonly skipped?: SkippedTally;
}

/** The part of the data that `rank` reads. */
export function dataPlaceOf(topology: Topology, rank: number): DataPlace {
	const { language, featureEdges } = topology;
	const laneCount = language.lanes;
	const textLane = language.contains(rank) ? language.coordinates(rank).dp : null;
	const reportsSkipped = textLane !== null && rank === language.lane(textLane, 0)[0];
	const own = featureEdges.filter(({ encoder }) => encoder.contains(rank));
	const features = Object.fromEntries(own.map((edge) => [edge.encoder.name, servedBy(edge, rank)]));
	const common = { textLane, laneCount, reportsSkipped, wantsText: textLane !== null, features };
	const vision = features[visionModule];
	if (vision === undefined) {
		const lanes = textLane === null ? [] : [textLane];
		return { ...common, lanes, share: wholeShare, reportsDamage: false, wantsImages: false };
	}
	const { encoder } = own.find((edge) => edge.encoder.name === visionModule)!;
	const reportsDamage = rank === encoder.lane(encoder.coordinates(rank).dp, 0)[0];
	return { ...common, ...vision, reportsDamage, wantsImages: true };
}

/** The lanes that an encoder's rank serves, and its part of them. */
function servedBy({ encoder, routes }: Topology["featureEdges"][number], rank: number) {
	const { dp } = encoder.coordinates(rank);
	const lanes = routes.filter(({ source }) => source === dp).map(({ destination }) => destination);
	const sources = routes.filter(({ destination }) => destination === lanes[0]).map(({ source }) => source);
	return { lanes, share: { index: sources.indexOf(dp), count: sources.length } };
}

/** Ranks that take the same microbatches as `rank`, ascending: one of them reads for all. */
export function readersWith(topology: Topology, rank: number): number[] {
	const keyOf = (one: number) =>
		JSON.stringify({ ...dataPlaceOf(topology, one), reportsSkipped: null, reportsDamage: null });
	const wanted = keyOf(rank);
	return Array.from({ length: topology.worldSize }, (_, one) => one).filter((one) => keyOf(one) === wanted);
}

/**
 * Builds a rank's microbatch `index` of a step from the batches of the lanes that it reads: its own lane's text, and for each of its
 * encoders its share of the lanes that it serves, in lane order. `firstOf`: index of a lane's first sample in the global batch.
 */
export function ownMicrobatch(
	{ textLane, features }: Pick<DataPlace, "textLane" | "features">,
	read: ReadonlyMap<number, ImageTextMicrobatch>,
	index: number,
	firstOf: (lane: number) => number,
): ImageTextMicrobatch {
	const own = Object.entries(features).map(([module, { lanes, share }]) => {
		const sets = lanes.map((lane) => placeImages(read.get(lane)!.features[module]!, firstOf(lane)));
		return [module, shareOfImages(joinImages(sets), share, index)] as const;
	});
	return { text: textLane === null ? noText : read.get(textLane)!.text, features: Object.fromEntries(own) };
}
