/** The tokens that importance is measured on. */
import type { Microbatch } from "../../../data/microbatch.ts";

/**
 * [T]: 1 for tokens on which a loss depends, those with a counting label or before one in their sequence. The others (padding,
 * samples that only fill a lane) affect no loss, and their number depends on the layout.
 */
export function countedTokens({ lossMask, lengths }: Pick<Microbatch, "lossMask" | "lengths">): Uint8Array {
	const counted = new Uint8Array(lossMask.length);
	let begin = 0;
	for (const length of lengths) {
		const last = lossMask.subarray(begin, begin + length).findLastIndex((value) => value > 0);
		counted.fill(1, begin, begin + last + 1);
		begin += length;
	}
	return counted;
}

/** Of all tokens, those that a rank's rows hold: all, or its equal run of them between layers. */
export function countedRows(counted: Uint8Array, rows: number, rank: number): Uint8Array {
	return rows === counted.length ? counted : counted.subarray(rank * rows, (rank + 1) * rows);
}
