/** Splits requests over the lanes of a layout, in rounds: one round is a microbatch a rank. */
import { type ImageSet, joinImages } from "../data/images.ts";
import { type ImageTextMicrobatch, type Microbatch, mediaPositions, noText } from "../data/microbatch.ts";
import { shareOfImages } from "../data/routing/image-share.ts";
import { joined } from "../data/vision-language/batch.ts";
import { ignored } from "../data/vision-language/encoding.ts";
import { patchGrids } from "../data/vision-language/image-plan.ts";
import { imagePatches } from "../data/vision-language/pixels.ts";
import type { EncodedPrompt } from "../data/vision-language/prompt.ts";
import type { VisionLanguageTask } from "../data/vision-language/task.ts";
import type { Images } from "../native/images.ts";
import { type Topology, visionModule } from "../parallel/index.ts";
import type { DataPlace } from "../train/feed/batch-source.ts";

/** Sequences of a lane in a round, at most `wanted`: lanes, and encoder ranks that share one, have equally many. */
export function sequencesPerLane({ encoders, language }: Topology, requests: number, wanted: number): number {
	const unit = Math.max(1, ...encoders.map(({ lanes }) => lanes / language.lanes));
	const needed = Math.min(wanted, Math.ceil(requests / language.lanes));
	return Math.ceil(needed / unit) * unit;
}

/** The prompt that fills up a lane with too few sequences. */
const filler: EncodedPrompt = { ids: Int32Array.of(0), images: [] };

export interface Dealt {
	readonly microbatch: ImageTextMicrobatch;
	/** Places in the round of the text lane's sequences, fillers excluded. */
	readonly places: readonly number[];
}

/** A prompt with the labels of the tokens whose losses are wanted; −100 for the others. */
export interface LabelledPrompt extends EncodedPrompt {
	readonly labels?: Int32Array;
}

/**
 * This rank's part of a round of prompts, one microbatch: lane after lane, `perLane` sequences each, padded with fillers. `unit`:
 * the microbatch's tokens are padded to a multiple of it.
 */
export function deal(
	prompts: readonly LabelledPrompt[],
	perLane: number,
	place: DataPlace,
	task: VisionLanguageTask,
	images: Images,
	unit = 1,
): Dealt {
	const laneOf = (lane: number) =>
		Array.from({ length: perLane }, (_, index) => prompts[lane * perLane + index] ?? filler);
	const { textLane } = place;
	const places =
		textLane === null
			? []
			: Array.from({ length: perLane }, (_, index) => textLane * perLane + index).filter((at) => at < prompts.length);
	const text = textLane === null ? noText : textOf(laneOf(textLane), unit, task);
	const all = () => joinImages(place.lanes.map((lane) => imagesOf(laneOf(lane), task, images)));
	const features = place.wantsImages ? { [visionModule]: shareOfImages(all(), place.share, 0) } : {};
	return { microbatch: { text, features }, places };
}

/** One sequence a prompt, and one of padding where the tokens are no multiple of `unit`. */
function textOf(prompts: readonly LabelledPrompt[], unit: number, task: VisionLanguageTask): Microbatch {
	const own = prompts.map(({ ids }) => ids.length);
	const used = own.reduce((sum, length) => sum + length, 0);
	const padding = (unit - (used % unit)) % unit;
	const tokens = used + padding;
	const lengths = padding === 0 ? own : [...own, padding];
	const ids = new Int32Array(tokens);
	const labels = new Int32Array(tokens).fill(ignored);
	let at = 0;
	for (const prompt of prompts) {
		ids.set(prompt.ids, at);
		if (prompt.labels) labels.set(prompt.labels, at);
		at += prompt.ids.length;
	}
	const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
	// Image rows are counted by prompt: padding belongs to the last one.
	const samples = own.map((length, index) => (index === own.length - 1 ? length + padding : length));
	const { mrope, tower, imageTokenId: placeholder } = task;
	const grids = mrope ? prompts.flatMap((prompt) => gridsOf(prompt, tower)) : [];
	const positions = mediaPositions({ ids, lengths }, grids, { placeholder, merge: tower.pixelShuffle ? 2 : 1 });
	return { ids, labels, lossMask, lengths, samples, ...(positions && { positions }) };
}

const gridsOf = ({ images }: EncodedPrompt, { patchSize }: VisionLanguageTask["tower"]) =>
	images.flatMap(({ plan }) => patchGrids(plan, patchSize));

function imagesOf(
	prompts: readonly EncodedPrompt[],
	{ tower, statistics, resampling }: VisionLanguageTask,
	images: Images,
): ImageSet {
	const all = prompts.flatMap((prompt) => prompt.images);
	const patches = all.flatMap((image) => imagePatches(images, { ...image, statistics, resampling }, tower.patchSize));
	const grids = prompts.map((prompt) => gridsOf(prompt, tower));
	return {
		patches: joined(patches),
		grids: grids.flat(),
		imagesPerSample: grids.map(({ length }) => length),
	};
}
