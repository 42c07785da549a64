/** Chooses the samples that share a sequence. */
import type { Division } from "../energon/wrappers/packing.ts";

/**
 * greedy: all packs that the greedy knapsack makes of a buffer, the badly filled last ones too. carry-over: the fuller half
 * of them; the samples of the others are the first of the next buffer.
 */
export type PackingMethod = "carry-over" | "greedy";

type LengthOf<Item> = (item: Item) => number;

/** A buffer divided into packs of at most `capacity`. Samples longer than the capacity have no pack. */
export function choosePacks<Item>(
	items: readonly Item[],
	lengthOf: LengthOf<Item>,
	capacity: number,
	method: PackingMethod,
): Division<Item> {
	if (method === "greedy") return { groups: greedyKnapsack(items, lengthOf, capacity), carried: [] };
	return fullerHalf(items, lengthOf, capacity);
}

/**
 * Groups of samples whose lengths sum to at most `capacity`, each begun with the longest sample left and filled with the
 * longest that still fits (the greedy knapsack of Megatron-LM's multimodal examples). Samples longer than the capacity
 * have no group.
 */
export function greedyKnapsack<Item>(items: readonly Item[], lengthOf: LengthOf<Item>, capacity: number): Item[][] {
	const left = ascending(items, lengthOf, capacity);
	const groups: Item[][] = [];
	while (left.length > 0) groups.push(fill([], left, lengthOf, capacity));
	return groups;
}

/**
 * The fuller half of the packs, and the samples of the others in the order of `items`. The first sample, which has waited
 * longest, begins a pack that is always made: no sample is carried over for ever.
 */
function fullerHalf<Item>(items: readonly Item[], lengthOf: LengthOf<Item>, capacity: number): Division<Item> {
	const fitting = items.filter((item) => lengthOf(item) <= capacity);
	const [oldest, ...others] = fitting;
	if (oldest === undefined) return { groups: [], carried: [] };
	const left = ascending(others, lengthOf, capacity);
	const packs = [fill([oldest], left, lengthOf, capacity - lengthOf(oldest))];
	while (left.length > 0) packs.push(fill([], left, lengthOf, capacity));
	const tokens = new Map(packs.map((pack) => [pack, pack.reduce((sum, item) => sum + lengthOf(item), 0)]));
	const fullest = packs.toSorted((a, b) => tokens.get(b)! - tokens.get(a)!).slice(0, Math.ceil(packs.length / 2));
	const made = new Set([packs[0]!, ...fullest]);
	const groups = packs.filter((pack) => made.has(pack));
	const gone = new Set(groups.flat());
	return { groups, carried: fitting.filter((item) => !gone.has(item)) };
}

/** Items of at most `capacity`, the shortest first. */
function ascending<Item>(items: readonly Item[], lengthOf: LengthOf<Item>, capacity: number): Item[] {
	return items.filter((item) => lengthOf(item) <= capacity).sort((a, b) => lengthOf(a) - lengthOf(b));
}

/** Moves the longest of `left` that fits into the group, again and again. */
function fill<Item>(group: Item[], left: Item[], lengthOf: LengthOf<Item>, room: number): Item[] {
	let rest = room;
	for (let place = lastOfAtMost(rest); place >= 0; place = lastOfAtMost(rest)) {
		const [item] = left.splice(place, 1) as [Item];
		group.push(item);
		rest -= lengthOf(item);
	}
	return group;

	/** Place of the last that is at most `length` long; −1 if there is none. */
	function lastOfAtMost(length: number): number {
		let [low, high] = [0, left.length];
		while (low < high) {
			const middle = (low + high) >> 1;
			if (lengthOf(left[middle]!) <= length) low = middle + 1;
			else high = middle;
		}
		return low - 1;
	}
}
