/** Rows of S + 1 tokens of several documents as a microbatch (_get_ltor_masks_and_position_ids of megatron/core/datasets/gpt_dataset.py). */
import { type Microbatch, nextTokenMicrobatch } from "../microbatch.ts";

export interface DocumentOptions {
	/** Token that ends a document; null: documents are not told apart. */
	readonly end: number | null;
	/** Leaves the label after a document's end, which begins the next document, out of the loss. */
	readonly maskEnds: boolean;
	/** Makes a row's documents sequences of their own: they see nothing of each other, and their positions begin at 0. */
	readonly separate: boolean;
}

export function documentMicrobatch(rows: readonly Int32Array[], options: DocumentOptions): Microbatch {
	const { end, maskEnds, separate } = options;
	const plain = nextTokenMicrobatch(rows);
	const { ids, lossMask } = plain;
	if (maskEnds) for (let i = 0; i < ids.length; i++) if (ids[i] === end) lossMask[i] = 0;
	if (!separate) return plain;
	const lengths: number[] = [];
	let begin = 0;
	let rowEnd = 0;
	for (const length of plain.lengths) {
		rowEnd += length;
		for (let i = begin; i < rowEnd; i++) {
			if (ids[i] !== end && i < rowEnd - 1) continue;
			lengths.push(i + 1 - begin);
			begin = i + 1;
		}
	}
	return { ...plain, lengths, samples: plain.lengths };
}
