/**
 * Pieces of text and images → token ids, labels and loss mask (spec vision 4.1, 4.5, 5.5). An image has one image token
 * for every row the encoder gives; a sequence that is too long is cut, never within an image.
 */
import { SampleError } from "../energon/errors.ts";
import type { TextPart, Tokenizer } from "../text/tokenizer.ts";
import type { EncodedImage } from "./encoded-image.ts";
import { type ImagePlan, type ImageSizing, planImages, planRows, type TowerGeometry } from "./image-plan.ts";
import type { Piece } from "./template.ts";

export interface EncodingOptions {
	/** Most tokens of a sample. */
	readonly sequenceLength: number;
	readonly imageTokenId: number;
	/** Put before and after every sample; null = none. */
	readonly beginId: number | null;
	readonly endId: number | null;
	readonly sizing: ImageSizing;
	readonly tower: TowerGeometry;
}

export interface EncodedText {
	/** [T]. */
	readonly ids: Int32Array;
	/** Next token where it counts in the loss, else −100; [T]. */
	readonly labels: Int32Array;
	/** Images that were kept, in order. */
	readonly images: readonly (EncodedImage & { readonly plan: ImagePlan })[];
}

/** Label of a token that does not count. */
export const ignored = -100;

/** Tokens upstream keeps free when it sizes images. */
const spareTokens = 4;

/** Ids that belong together: cut anywhere, or an image that stays whole. */
type Run =
	| { readonly ids: ArrayLike<number>; readonly loss: boolean }
	| { readonly image: number; readonly before: Int32Array; readonly after: Int32Array; readonly loss: boolean };

/** Throws a SampleError when nothing of the sample can be learned. */
export function encodePieces(
	key: string,
	pieces: readonly Piece[],
	images: readonly EncodedImage[],
	tokenizer: Tokenizer,
	options: EncodingOptions,
): EncodedText {
	const { sequenceLength, imageTokenId, tower } = options;
	const tokens = (parts: readonly TextPart[]): Int32Array => {
		const ids = tokenizer.encodeParts(parts);
		if (ids.includes(imageTokenId)) {
			throw new SampleError(`Sample ${key} has the image token ${imageTokenId} in its text.`, key);
		}
		return ids;
	};
	const runs = pieces.map((piece): Run => {
		if ("parts" in piece) return { ids: tokens(piece.parts), loss: piece.loss };
		const tag = (text: string) => tokens([{ text, markup: true }]);
		return { ...piece, before: tag(piece.before), after: tag(piece.after) };
	});
	if (options.beginId !== null) runs.unshift({ ids: [options.beginId], loss: false });
	if (options.endId !== null) runs.push({ ids: [options.endId], loss: runs.at(-1)?.loss ?? false });
	const textTokens = runs.reduce((sum, run) => sum + ("ids" in run ? run.ids.length : tagTokens(run)), 0);
	const plans = planImages(images, sequenceLength - textTokens - spareTokens, options.sizing, tower);
	const sequence = new Sequence(sequenceLength, imageTokenId);
	const kept: number[] = [];
	for (const run of runs) {
		if ("ids" in run) {
			if (!sequence.addText(run.ids, run.loss)) break;
		} else {
			const rows = planRows(plans[run.image]!, tower);
			if (tagTokens(run) + rows > sequence.room) break;
			sequence.addText(run.before, run.loss);
			sequence.addImage(rows);
			sequence.addText(run.after, run.loss);
			kept.push(run.image);
		}
	}
	const { ids, labels } = sequence.finish();
	if (labels.every((label) => label === ignored)) {
		throw new SampleError(
			`Sample ${key} has no token within ${sequenceLength} that counts in the loss: raise --seq-length.`,
			key,
		);
	}
	return { ids, labels, images: kept.map((image) => ({ ...images[image]!, plan: plans[image]! })) };
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
	addText(ids: ArrayLike<number>, loss: boolean): boolean {
		const count = Math.min(ids.length, this.room);
		for (let i = 0; i < count; i++) this.#ids[this.#length + i] = ids[i]!;
		this.#loss.fill(loss ? 1 : 0, this.#length, this.#length + count);
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
