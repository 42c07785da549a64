/** A microbatch as an MTP depth reads it. */
import type { Microbatch } from "./microbatch.ts";

/** Ids, labels and mask of the tokens `shift` places later in the same sequence; zeros where the sequence has ended. */
export function rolled(
	{ ids, labels, lossMask, lengths }: Pick<Microbatch, "ids" | "labels" | "lossMask" | "lengths">,
	shift: number,
): Pick<Microbatch, "ids" | "labels" | "lossMask"> {
	const later = {
		ids: new Int32Array(ids.length),
		labels: new Int32Array(ids.length),
		lossMask: new Float32Array(ids.length),
	};
	let begin = 0;
	for (const length of lengths) {
		const end = begin + length;
		const from = Math.min(begin + shift, end);
		later.ids.set(ids.subarray(from, end), begin);
		later.labels.set(labels.subarray(from, end), begin);
		later.lossMask.set(lossMask.subarray(from, end), begin);
		begin = end;
	}
	return later;
}
