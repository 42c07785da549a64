import type { PatchGrid } from "../models/tower.ts";
import { type ImageSet, noImages } from "./images.ts";

/** Tokens that a language model trains on at once: `lengths.length` sequences laid one after the other. */
export interface Microbatch {
	/** Token ids, [T]. */
	readonly ids: Int32Array;
	/** Next tokens, [T]; −100: the token has no label. */
	readonly labels: Int32Array;
	/** 1 where a label counts in the loss, else 0; [T]. */
	readonly lossMask: Float32Array;
	/** Tokens of every sequence; they sum to T. */
	readonly lengths: readonly number[];
	/**
	 * Positions on the axes time, row and column of multimodal rotary embedding, [3, T]; absent: a token's place in its sequence,
	 * on each.
	 */
	readonly positions?: Int32Array;
	/**
	 * Tokens of every sample that the encoder counts image rows for, where that is not a sequence: packs of several
	 * sequences. They sum to T too. All lanes have equally many of them, so that images can be dealt out.
	 */
	readonly samples?: readonly number[];
	/** Tokens that only fill samples up to their length; absent: none. */
	readonly padding?: number;
}

/** Text and what encoders read, which a model trains on at once. */
export interface ImageTextMicrobatch {
	/** Ids hold an encoder's placeholder token wherever a row of it belongs. */
	readonly text: Microbatch;
	/** Each encoder's input, by its name; an encoder that is absent reads nothing. */
	readonly features: Readonly<Record<string, ImageSet>>;
}

/** An encoder's input in a microbatch. */
export function featuresOf({ text, features }: ImageTextMicrobatch, module: string): ImageSet {
	return features[module] ?? noImages(sampleLengths(text).length);
}

/** Tokens of every sample that image rows are counted for. */
export function sampleLengths({ samples, lengths }: Pick<Microbatch, "samples" | "lengths">): readonly number[] {
	return samples ?? lengths;
}

/** Σ loss mask of a microbatch. */
export function lossTokens({ lossMask }: Pick<Microbatch, "lossMask">): number {
	return lossMask.reduce((sum, weight) => sum + weight, 0);
}

/** Text alone. */
export function withoutImages(text: Microbatch): ImageTextMicrobatch {
	return { text, features: {} };
}

/** The text of a rank that reads none. */
export const noText: Microbatch = {
	ids: new Int32Array(0),
	labels: new Int32Array(0),
	lossMask: new Float32Array(0),
	lengths: [],
};

/** Several texts, one after the other. */
export function joinTexts(texts: readonly Microbatch[]): Microbatch {
	if (texts.length === 1) return texts[0]!;
	const total = texts.reduce((sum, { ids }) => sum + ids.length, 0);
	const all = { ids: new Int32Array(total), labels: new Int32Array(total), lossMask: new Float32Array(total) };
	let at = 0;
	for (const { ids, labels, lossMask } of texts) {
		all.ids.set(ids, at);
		all.labels.set(labels, at);
		all.lossMask.set(lossMask, at);
		at += ids.length;
	}
	return {
		...all,
		lengths: texts.flatMap(({ lengths }) => lengths),
		samples: texts.flatMap(sampleLengths),
		padding: texts.reduce((sum, { padding = 0 }) => sum + padding, 0),
		...joinPositions(texts),
	};
}

const axes = 3;

/** The positions of several texts, if one of them has any. */
export function joinPositions(texts: readonly Microbatch[]): Pick<Microbatch, "positions"> {
	if (texts.every(({ positions }) => positions === undefined)) return {};
	const parts = Array.from({ length: axes }, (_, axis) =>
		texts.flatMap(({ ids, lengths, positions }) => [
			...(positions?.subarray(axis * ids.length, (axis + 1) * ids.length) ?? placesIn(lengths)),
		]),
	);
	return { positions: Int32Array.from(parts.flat()) };
}

function placesIn(lengths: readonly number[]): number[] {
	return lengths.flatMap((length) => Array.from({ length }, (_, place) => place));
}

/**
 * Positions of multimodal rotary embedding (docs/spec/vision.md §4.6): text counts on all axes; the rows of a picture, whose grid has
 * `merge` patches a side in a row's block, have one time and their own rows and columns, and the text behind goes on beyond the
 * largest. `grids`: of the pictures in the order of their placeholders. null: there are no pictures.
 */
export function mediaPositions(
	{ ids, lengths }: Pick<Microbatch, "ids" | "lengths">,
	grids: readonly PatchGrid[],
	{ placeholder, merge }: { readonly placeholder: number; readonly merge: number },
): Int32Array | null {
	if (grids.length === 0) return null;
	const positions = new Int32Array(axes * ids.length);
	let [token, picture] = [0, 0];
	const put = (time: number, row: number, column: number) => {
		for (const [axis, position] of [time, row, column].entries()) positions[axis * ids.length + token] = position;
		token++;
	};
	for (const length of lengths) {
		let next = 0;
		for (const end = token + length; token < end; ) {
			const grid = ids[token] === placeholder ? grids[picture] : undefined;
			if (grid === undefined) {
				put(next, next, next++);
				continue;
			}
			picture++;
			const [rows, columns] = [grid.rows / merge, grid.columns / merge];
			const last = Math.min(end, token + rows * columns);
			for (let at = 0; token < last; at++) put(next, next + Math.floor(at / columns), next + (at % columns));
			next += Math.max(rows, columns);
		}
	}
	return positions;
}

/** Rows of S + 1 tokens become inputs [:, :-1] and labels [:, 1:]; every label counts. */
export function nextTokenMicrobatch(rows: readonly Int32Array[]): Microbatch {
	const lengths = rows.map((row) => row.length - 1);
	const total = lengths.reduce((sum, length) => sum + length, 0);
	const ids = new Int32Array(total);
	const labels = new Int32Array(total);
	let at = 0;
	for (const row of rows) {
		ids.set(row.subarray(0, -1), at);
		labels.set(row.subarray(1), at);
		at += row.length - 1;
	}
	return { ids, labels, lossMask: new Float32Array(total).fill(1), lengths };
}
