/**
 * The samples that every layout of `mimo verify` trains on: packs of sequences of random ids with images of random values, drawn
 * from the configuration's seed. Some have no image, and with dynamic resolution no two neighbours have equally many rows, so
 * that lanes and microbatches are uneven.
 */
import { type ImageSet, joinImages } from "../../data/images.ts";
import type { Microbatch } from "../../data/microbatch.ts";
import { outputRows, type PatchGrid, patchWidth, type RadioConfig } from "../../models/radio/config.ts";
import { UserError } from "../../system/errors.ts";

/** One sample: a pack of sequences and the images whose rows stand in it. */
export interface Sample {
	readonly text: Microbatch;
	readonly images: ImageSet;
}

export interface SampleOptions {
	readonly count: number;
	readonly sequenceLength: number;
	readonly vocabularySize: number;
	readonly seed: number;
	/** Whether some labels do not count, of every sample another share. */
	readonly gaps: boolean;
	/** null: every sample is text alone. */
	readonly images: ImageOptions | null;
}

export interface ImageOptions {
	readonly tower: RadioConfig;
	readonly imageTokenId: number;
	/** Largest image, in patches. */
	readonly grid: PatchGrid;
	/** Images of different sizes, and samples of two. */
	readonly dynamic: boolean;
	/** The last samples, which are text alone; so is sample 2, where there are more than four. */
	readonly textOnly: number;
}

const ignored = -100;

/** Sequences of a sample: equally many of all, because seq_aux_loss takes the mean of a microbatch's sequences. */
const sequencesOfSample = 3;

/** mulberry32: numbers in [0, 1) that repeat. */
export function numbersFrom(seed: number): () => number {
	let state = seed >>> 0;
	return () => {
		state = (state + 0x6d2b79f5) >>> 0;
		let t = Math.imul(state ^ (state >>> 15), 1 | state);
		t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
		return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
	};
}

export function drawSamples(options: SampleOptions): Sample[] {
	let image = 0;
	return Array.from({ length: options.count }, (_, index) => {
		const { text, images } = drawSample(options, index);
		return { text, images: { ...images, indices: images.grids.map(() => image++) } };
	});
}

/** Whether sample `index` is text alone. */
function isTextOnly(count: number, textOnly: number, index: number): boolean {
	return index >= count - textOnly || (textOnly > 0 && count > 4 && index === 2);
}

function drawSample(options: SampleOptions, index: number): Sample {
	const { count, sequenceLength, vocabularySize, images } = options;
	const next = numbersFrom(options.seed * 7919 + index);
	const chance = numbersFrom(options.seed * 7919 - 1 - index);
	const pictured = images !== null && !isTextOnly(count, images.textOnly, index) ? images : null;
	const grids = pictured === null ? [] : gridsOf(pictured, sequenceLength, index);
	const rows = grids.reduce((sum, grid) => sum + outputRows(pictured!.tower, grid), 0);
	if (rows >= sequenceLength) {
		throw new UserError(`${rows} image rows leave no text in samples of seq-length ${sequenceLength}.`);
	}
	const word = () => {
		if (images === null) return Math.floor(next() * vocabularySize);
		const id = Math.floor(next() * (vocabularySize - 1));
		return id >= images.imageTokenId ? id + 1 : id;
	};
	// Images stand somewhere in the text, not only at its beginning.
	const first = Math.floor(next() * Math.min(8, sequenceLength - rows));
	const ids = Int32Array.from({ length: sequenceLength }, (_, at) =>
		at >= first && at < first + rows ? images!.imageTokenId : word(),
	);
	const ends = drawEnds(sequenceLength, next);
	const labels = Int32Array.from(ids, (_, at) => {
		const label = ends.includes(at + 1) ? ignored : ids[at + 1]!;
		const gap = options.gaps && 8 * chance() < index % 4;
		return gap || label === images?.imageTokenId ? ignored : label;
	});
	const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
	const patches = grids.reduce((sum, grid) => sum + grid.rows * grid.columns, 0);
	return {
		text: { ids, labels, lossMask, lengths: ends.map((end, at) => end - (ends[at - 1] ?? 0)) },
		images: {
			patches: Float32Array.from({ length: pictured ? patches * patchWidth(pictured.tower) : 0 }, () => 2 * next() - 1),
			grids,
			imagesPerSample: [grids.length],
		},
	};
}

/** Ends of a sample's sequences, each of a token at least. Borders may fall within an image, as in no data: nothing depends on it. */
function drawEnds(tokens: number, next: () => number): number[] {
	const ends = new Set([tokens]);
	while (ends.size < Math.min(sequencesOfSample, tokens)) ends.add(1 + Math.floor(next() * (tokens - 1)));
	return [...ends].sort((a, b) => a - b);
}

/** One image of the largest grid; with dynamic resolution smaller ones, and two where they leave half of the text. */
function gridsOf({ tower, grid, dynamic }: ImageOptions, sequenceLength: number, index: number): PatchGrid[] {
	if (!dynamic) return [grid];
	const shrunk = (size: number, by: number) => Math.max(2, size - 2 * by);
	const one = { rows: shrunk(grid.rows, index % 3), columns: shrunk(grid.columns, (index + 1) % 2) };
	const two = { rows: 2, columns: 4 };
	const rows = outputRows(tower, one) + outputRows(tower, two);
	return index % 4 === 1 && 2 * rows <= sequenceLength ? [one, two] : [one];
}

/** Samples as one microbatch of the language model. */
export function joinText(samples: readonly Sample[]): Microbatch {
	const tokens = samples.reduce((sum, { text }) => sum + text.ids.length, 0);
	const joined = { ids: new Int32Array(tokens), labels: new Int32Array(tokens), lossMask: new Float32Array(tokens) };
	let at = 0;
	for (const { text } of samples) {
		joined.ids.set(text.ids, at);
		joined.labels.set(text.labels, at);
		joined.lossMask.set(text.lossMask, at);
		at += text.ids.length;
	}
	const packed = samples.some(({ text }) => text.lengths.length > 1);
	return {
		...joined,
		lengths: samples.flatMap(({ text }) => text.lengths),
		...(packed && { samples: samples.map(({ text }) => text.ids.length) }),
	};
}

/** Samples as one microbatch of the encoder. */
export function joinSampleImages(samples: readonly Sample[]): ImageSet {
	return joinImages(samples.map(({ images }) => images));
}
