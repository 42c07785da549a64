/** A stand-in for the lengths of an instruction set, and how much of the sequences ways to pack them leave empty. */
import { choosePacks, type PackingMethod } from "../../../src/data/vision-language/packing.ts";

/**
 * Token counts of samples: lognormal, median 665 and mean 997 (µ 6.5, σ 0.9 of the logarithm), cut at the capacity. The
 * same numbers every time.
 */
export function instructionLengths(count: number, capacity: number, { mu = 6.5, sigma = 0.9 } = {}): number[] {
	let state = 1;
	const uniform = () => {
		state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
		return (state + 0.5) / 2 ** 32;
	};
	const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
	return Array.from({ length: count }, () =>
		Math.min(capacity, Math.max(2, Math.round(Math.exp(mu + sigma * normal())))),
	);
}

/** first-fit: every sample goes into the first open pack with room, as it comes; a buffer's packs are made together. */
export type Packer = PackingMethod | "first-fit";

/** Packs of a buffer, each sample in the first that has room. */
function firstFit(items: readonly number[], lengthOf: (item: number) => number, capacity: number): number[][] {
	const packs: { readonly items: number[]; room: number }[] = [];
	for (const item of items) {
		const length = lengthOf(item);
		let pack = packs.find(({ room }) => room >= length);
		if (pack === undefined) {
			pack = { items: [], room: capacity };
			packs.push(pack);
		}
		pack.items.push(item);
		pack.room -= length;
	}
	return packs.map(({ items: members }) => members);
}

/** Part of all sequences that is padding when a stream is packed through a buffer of `size` samples. */
export function wasteOf(lengths: readonly number[], capacity: number, size: number, packer: Packer): number {
	const lengthOf = (item: number) => lengths[item]!;
	let [next, packs, tokens] = [0, 0, 0];
	let buffer: number[] = [];
	for (;;) {
		while (buffer.length < size && next < lengths.length) buffer.push(next++);
		// The end of a stream says nothing about a training that has none.
		if (buffer.length < size) return 1 - tokens / (packs * capacity);
		const { groups, carried } =
			packer === "first-fit"
				? { groups: firstFit(buffer, lengthOf, capacity), carried: [] }
				: choosePacks(buffer, lengthOf, capacity, packer);
		packs += groups.length;
		tokens += groups.flat().reduce((sum, item) => sum + lengthOf(item), 0);
		buffer = [...carried];
	}
}
