/**
 * Samples with a damaged image, which only the ranks that encode it notice: all ranks exchange them before they train, and the
 * language ranks mask their tokens out of the loss. What a rank reads therefore never depends on what another rank decodes.
 */
import type { Microbatch } from "../microbatch.ts";
import { ignored } from "../vision-language/encoding.ts";

/** A sample by its place in the step. */
export interface Damage {
	readonly lane: number;
	/** Of the lane's microbatches since the last exchange. */
	readonly microbatch: number;
	readonly sample: number;
}

/** Integers of a damaged sample in an exchange. */
const width = 3;

/**
 * The damaged samples of all ranks, each once. Every rank calls this with `most`, the largest number that a rank has, which
 * all know.
 */
export function exchangeDamage(
	own: readonly Damage[],
	most: number,
	exchange: (values: Int32Array) => Int32Array[],
): Damage[] {
	if (most === 0) return [];
	const values = new Int32Array(most * width).fill(-1);
	for (const [i, { lane, microbatch, sample }] of own.entries()) values.set([lane, microbatch, sample], i * width);
	const all = new Map<string, Damage>();
	for (const one of exchange(values)) {
		for (let at = 0; at < one.length; at += width) {
			const [lane, microbatch, sample] = one.subarray(at, at + width) as unknown as [number, number, number];
			if (lane >= 0) all.set(`${lane} ${microbatch} ${sample}`, { lane, microbatch, sample });
		}
	}
	return [...all.values()];
}

/** Leaves the tokens [begin, end) out of the loss. */
export function leaveOut({ labels, lossMask }: Microbatch, [begin, end]: readonly [number, number]): void {
	labels.fill(ignored, begin, end);
	lossMask.fill(0, begin, end);
}
