/**
 * The samples that every layout of `mimo verify` trains on: packs of sequences of random ids with images of random values, drawn
 * from the configuration's seed. Some have no image, and with dynamic resolution no two neighbours have equally many rows, so
 * that lanes and microbatches are uneven.
 */
import { type ImageSet, joinImages } from "../../data/images.ts";
import { featuresOf, type ImageTextMicrobatch, type Microbatch } from "../../data/microbatch.ts";
import { outputRows, patchWidth, type RadioConfig } from "../../models/radio/config.ts";
import type { PatchGrid } from "../../models/tower.ts";
import { visionModule } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";

/** One sample: a pack of sequences, and what encoders read whose rows stand in it. */
export type Sample = ImageTextMicrobatch;

export interface SampleOptions {
	readonly count: number;
	readonly sequenceLength: number;
	readonly vocabularySize: number;
	readonly seed: number;
	/** Whether some labels do not count, of every sample another share. */
	readonly gaps: boolean;
	/** null: no sample has an image. */
	readonly images: ImageOptions | null;
	/** Items of further encoders, one of each in most samples, whose tokens follow the image's; default: none. */
	readonly others?: readonly {
		readonly name: string;
		/** Placeholder token. */
		readonly id: number;
		readonly grid: PatchGrid;
		/** Values of a patch. */
		readonly width: number;
	}[];
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
		const { text, images, others } = drawSample(options, index);
		if (options.images === null) return { text, features: others };
		const placed = { ...images, indices: images.grids.map(() => image++) };
		return { text, features: { [visionModule]: placed, ...others } };
	});
}

/** Whether sample `index` is text alone. */
function isTextOnly(count: number, textOnly: number, index: number): boolean {
	return index >= count - textOnly || (textOnly > 0 && count > 4 && index === 2);
}

function drawSample(
	options: SampleOptions,
	index: number,
): { readonly text: Microbatch; readonly images: ImageSet; readonly others: Readonly<Record<string, ImageSet>> } {
	const { count, sequenceLength, vocabularySize, images, others = [] } = options;
	const next = numbersFrom(options.seed * 7919 + index);
	const chance = numbersFrom(options.seed * 7919 - 1 - index);
	const pictured = images !== null && !isTextOnly(count, images.textOnly, index) ? images : null;
	const grids = pictured === null ? [] : gridsOf(pictured, sequenceLength, index);
	const rows = grids.reduce((sum, grid) => sum + outputRows(pictured!.tower, grid), 0);
	// Of every three samples one has no item of a further encoder, each encoder another one.
	const heard = others.filter((_, at) => (index + at) % 3 !== 1);
	const more = heard.flatMap(({ id, grid }) => new Array<number>(grid.rows * grid.columns).fill(id));
	if (rows + more.length >= sequenceLength) {
		throw new UserError(`${rows + more.length} image rows leave no text in samples of seq-length ${sequenceLength}.`);
	}
	const taken = [...(images === null ? [] : [images.imageTokenId]), ...others.map(({ id }) => id)].sort(
		(a, b) => a - b,
	);
	const word = () =>
		taken.reduce((id, own) => (id >= own ? id + 1 : id), Math.floor(next() * (vocabularySize - taken.length)));
	// Images stand somewhere in the text, not only at its beginning.
	const first = Math.floor(next() * Math.min(8, sequenceLength - rows - more.length));
	const placed = [...new Array<number>(rows).fill(images?.imageTokenId ?? 0), ...more];
	const ids = Int32Array.from({ length: sequenceLength }, (_, at) => placed[at - first] ?? word());
	const ends = drawEnds(sequenceLength, next);
	const labels = Int32Array.from(ids, (_, at) => {
		const label = ends.includes(at + 1) ? ignored : ids[at + 1]!;
		const gap = options.gaps && 8 * chance() < index % 4;
		return gap || taken.includes(label) ? ignored : label;
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
		others: Object.fromEntries(
			others.map((other) => [
				other.name,
				{
					patches: Float32Array.from(
						{ length: heard.includes(other) ? other.grid.rows * other.grid.columns * other.width : 0 },
						() => 2 * next() - 1,
					),
					grids: heard.includes(other) ? [other.grid] : [],
					imagesPerSample: [heard.includes(other) ? 1 : 0],
				},
			]),
		),
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

/** Samples as one microbatch of an encoder. */
export function joinSampleFeatures(samples: readonly Sample[], encoder: string): ImageSet {
	return joinImages(samples.map((sample) => featuresOf(sample, encoder)));
}
