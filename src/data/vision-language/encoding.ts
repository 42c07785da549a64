/**
 * Pieces of text and images → token ids, labels and loss mask (docs/spec/vision.md §4.1, §4.5, §5.5). An image has one
 * image token for every row the encoder gives; a sequence that is too long is cut, never within an image.
 */
import { counted } from "../../system/counted.ts";
import { ExpectedLoss, SampleError } from "../energon/errors.ts";
import type { Sample } from "../energon/sample.ts";
import { type CountedPart, encodeCounted } from "../text/loss-parts.ts";
import type { Tokenizer } from "../text/tokenizer.ts";
import type { EncodedSample } from "./batch.ts";
import {
	type ImagePlan,
	type ImageSizing,
	patchesOfRow,
	planImages,
	planPatches,
	rowsOfTiles,
	type TowerGeometry,
	tileTags,
} from "./image-plan.ts";
import type { DecodableImage } from "./pixels.ts";
import type { Piece } from "./prompt.ts";

export interface EncodingOptions {
	/** Most tokens of a sample. */
	readonly sequenceLength: number;
	/** Most patches of a sample's images; null: as many as its tokens hold. */
	readonly mostPatches: number | null;
	readonly imageTokenId: number;
	/** Put before and after every sample; null = none. */
	readonly beginId: number | null;
	readonly endId: number | null;
	readonly sizing: ImageSizing;
	readonly tower: TowerGeometry;
	/** Treatment of a sample of more tokens: truncate cuts off its end, skip leaves it out. */
	readonly tooLong: "truncate" | "skip";
}

export interface EncodedText {
	/** [T]. */
	readonly ids: Int32Array;
	/** Next token where it counts in the loss, else −100; [T]. */
	readonly labels: Int32Array;
	/** Images that were kept, in order. */
	readonly images: readonly (DecodableImage & { readonly plan: ImagePlan })[];
}

/** Label of a token that does not count. */
export const ignored = -100;

/** Tokens upstream keeps free when it sizes images. */
const spareTokens = 4;

/** Ids that belong together: cut anywhere, or an image that stays whole. */
type Run =
	| { readonly ids: Int32Array; readonly loss: Uint8Array }
	| { readonly image: number; readonly before: Int32Array; readonly after: Int32Array; readonly loss: boolean };

interface Tile {
	readonly tag: Int32Array;
	readonly rows: number;
}

const none = new Int32Array(0);

/** Throws a SampleError when nothing of the sample can be learned. */
export function encodePieces(
	key: string,
	pieces: readonly Piece[],
	images: readonly DecodableImage[],
	tokenizer: Tokenizer,
	options: EncodingOptions,
): EncodedText {
	const { sequenceLength, imageTokenId, tower } = options;
	const mostPatches = options.mostPatches ?? Number.POSITIVE_INFINITY;
	const tokens = (parts: readonly CountedPart[]) => {
		const encoded = encodeCounted(tokenizer, parts);
		if (encoded.ids.includes(imageTokenId)) {
			throw new SampleError(`Sample ${key} has the image token ${imageTokenId} in its text.`, key);
		}
		return encoded;
	};
	const tag = (text: string) => tokens([{ text, markup: true, loss: false }]).ids;
	const runs = pieces.map((piece): Run => {
		if ("parts" in piece) return tokens(piece.parts);
		return { ...piece, before: tag(piece.before), after: tag(piece.after) };
	});
	const one = (id: number, loss: boolean): Run => ({ ids: Int32Array.of(id), loss: Uint8Array.of(loss ? 1 : 0) });
	if (options.beginId !== null) runs.unshift(one(options.beginId, false));
	if (options.endId !== null) runs.push(one(options.endId, lastCounts(runs.at(-1))));
	const textTokens = runs.reduce((sum, run) => sum + ("ids" in run ? run.ids.length : tagTokens(run)), 0);
	const tagged = options.sizing.mode === "tiles" && options.sizing.tags;
	const longestTag = tagged ? tag("<tile_global_thumbnail>").length : 0;
	const rows = Math.min(sequenceLength - textTokens - spareTokens, Math.floor(mostPatches / patchesOfRow(tower)));
	const plans = planImages(images, rows, options.sizing, tower, longestTag);
	const patchesOf = (image: number) => planPatches(plans[image]!, tower.patchSize);
	/** Of every tile of an image its tag and its rows. */
	const tilesOf = plans.map((plan): readonly Tile[] => {
		const tags = tagged ? tileTags(plan).map(tag) : [];
		return rowsOfTiles(plan, tower).map((rows, i) => ({ tag: tags[i] ?? none, rows }));
	});
	const tokensOf = (image: number) => tilesOf[image]!.reduce((sum, tile) => sum + tile.tag.length + tile.rows, 0);
	if (options.tooLong === "skip") {
		const all = runs.reduce((sum, run) => sum + ("ids" in run ? 0 : tokensOf(run.image)), textTokens);
		if (all > sequenceLength) {
			throw new ExpectedLoss(
				`Sample ${key} has ${counted(all, "token")}, more than seq-length ${sequenceLength}.`,
				key,
			);
		}
		const patches = plans.reduce((sum, _, image) => sum + patchesOf(image), 0);
		if (patches > mostPatches) {
			throw new ExpectedLoss(
				`Sample ${key} has ${patches} patches, more than packing-max-patches ${mostPatches}.`,
				key,
			);
		}
	}
	const sequence = new Sequence(sequenceLength, imageTokenId);
	const kept: number[] = [];
	let patches = 0;
	for (const run of runs) {
		if ("ids" in run) {
			if (!sequence.addText(run.ids, run.loss)) break;
		} else {
			patches += patchesOf(run.image);
			if (tagTokens(run) + tokensOf(run.image) > sequence.room || patches > mostPatches) break;
			const add = (ids: Int32Array) => sequence.addText(ids, new Uint8Array(ids.length).fill(run.loss ? 1 : 0));
			add(run.before);
			for (const tile of tilesOf[run.image]!) {
				add(tile.tag);
				sequence.addImage(tile.rows);
			}
			add(run.after);
			kept.push(run.image);
		}
	}
	const { ids, labels } = sequence.finish();
	if (labels.every((label) => label === ignored)) {
		const counts = runs.some((run) => ("ids" in run ? run.loss.includes(1) : run.loss));
		const within = `has no token within ${sequenceLength} that counts in the loss: raise --seq-length`;
		throw new SampleError(`Sample ${key} ${counts ? within : "has no turn that counts in the loss"}.`, key);
	}
	return { ids, labels, images: kept.map((image) => ({ ...images[image]!, plan: plans[image]! })) };
}

/** A sample of indexed text; the prediction of every next token counts in the loss. Throws a SampleError for ids that no text can have. */
export function encodeTokens(
	{ key, restoreKey, sources, fields }: Sample,
	{ imageTokenId, vocabularySize }: Pick<EncodingOptions, "imageTokenId"> & { readonly vocabularySize: number | null },
): EncodedSample {
	const tokens = fields.tokens as Int32Array;
	const wrong = tokens.find((id) => id === imageTokenId || (vocabularySize !== null && id >= vocabularySize));
	if (wrong !== undefined) {
		const what = wrong === imageTokenId ? "the image token" : `outside of vocab-size ${vocabularySize}`;
		throw new SampleError(`Sample ${key} has the token ${wrong}, ${what}.`, key);
	}
	return { restoreKey, key, sources, ids: tokens.slice(0, -1), labels: tokens.slice(1), images: [] };
}

/** Whether the last token of a run counts. */
function lastCounts(run: Run | undefined): boolean {
	if (run === undefined) return false;
	return "ids" in run ? run.loss.at(-1) === 1 : run.loss;
}

function tagTokens({ before, after }: Extract<Run, { image: number }>): number {
	return before.length + after.length;
}

class Sequence {
	readonly #ids: Int32Array;
	readonly #loss: Uint8Array;
	#length = 0;

	constructor(
		capacity: number,
		private readonly imageTokenId: number,
	) {
		this.#ids = new Int32Array(capacity);
		this.#loss = new Uint8Array(capacity);
	}

	get room(): number {
		return this.#ids.length - this.#length;
	}

	/** Adds what there is room for; false when that was not all. */
	addText(ids: Int32Array, loss: Uint8Array): boolean {
		const count = Math.min(ids.length, this.room);
		this.#ids.set(ids.subarray(0, count), this.#length);
		this.#loss.set(loss.subarray(0, count), this.#length);
		this.#length += count;
		return count === ids.length;
	}

	addImage(rows: number): void {
		this.#ids.fill(this.imageTokenId, this.#length, this.#length + rows);
		this.#length += rows;
	}

	finish(): { ids: Int32Array; labels: Int32Array } {
		const ids = this.#ids.slice(0, this.#length);
		const labels = new Int32Array(ids.length).fill(ignored);
		for (let t = 0; t + 1 < ids.length; t++) {
			const counts = this.#loss[t + 1] === 1 && ids[t] !== this.imageTokenId && ids[t + 1] !== this.imageTokenId;
			if (counts) labels[t] = ids[t + 1]!;
		}
		return { ids, labels };
	}
}
