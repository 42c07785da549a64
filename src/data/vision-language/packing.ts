/** Which samples share a sequence. */

/**
 * Groups of samples whose lengths sum to at most `capacity`, each begun with the longest sample left and filled with the
 * longest that still fits (the greedy knapsack of Megatron-LM's multimodal examples). Samples longer than the capacity
 * have no group.
 */
export function greedyKnapsack<Item>(
	items: readonly Item[],
	lengthOf: (item: Item) => number,
	capacity: number,
): Item[][] {
	const left = items.filter((item) => lengthOf(item) <= capacity).sort((a, b) => lengthOf(a) - lengthOf(b));
	const groups: Item[][] = [];
	while (left.length > 0) {
		const group: Item[] = [];
		let room = capacity;
		for (let place = fitting(left, lengthOf, room); place >= 0; place = fitting(left, lengthOf, room)) {
			const [item] = left.splice(place, 1) as [Item];
			group.push(item);
			room -= lengthOf(item);
		}
		groups.push(group);
	}
	return groups;
}

/** Last of the ascending items that is at most `room` long; −1 if there is none. */
function fitting<Item>(ascending: readonly Item[], lengthOf: (item: Item) => number, room: number): number {
	let [low, high] = [0, ascending.length];
	while (low < high) {
		const middle = (low + high) >> 1;
		if (lengthOf(ascending[middle]!) <= room) low = middle + 1;
		else high = middle;
	}
	return low - 1;
}
