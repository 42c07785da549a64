/** Held-out samples as prompts: everything before the first token that counts, and the text that truly follows it. */
import type { Microbatch } from "../microbatch.ts";
import { ignored } from "./encoding.ts";

export interface CaptionPrompts {
	readonly prompts: Microbatch;
	/** Ids that follow each sequence, up to `endId`. */
	readonly truths: readonly (readonly number[])[];
}

/** Cuts the sequences of a microbatch, a sample each, before the first run of tokens that count; a damaged one has none. */
export function captionPrompts({ ids, labels, lengths }: Microbatch, endId: number): CaptionPrompts {
	const prompts: Int32Array[] = [];
	const truths: number[][] = [];
	let begin = 0;
	for (const length of lengths) {
		const own = labels.subarray(begin, begin + length);
		const first = own.findIndex((label) => label !== ignored);
		const end = own.findIndex((label, i) => i >= first && (label === ignored || label === endId));
		if (first === -1) {
			prompts.push(ids.subarray(begin, begin + length));
			truths.push([]);
			begin += length;
			continue;
		}
		prompts.push(ids.subarray(begin, begin + first + 1));
		truths.push([...own.subarray(first, end === -1 ? length : end)]);
		begin += length;
	}
	const all = Int32Array.from(prompts.flatMap((prompt) => [...prompt]));
	return {
		prompts: {
			ids: all,
			labels: new Int32Array(all.length).fill(ignored),
			lossMask: new Float32Array(all.length),
			lengths: prompts.map(({ length }) => length),
		},
		truths,
	};
}
