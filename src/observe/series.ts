/** Values over steps in bounded memory: consecutive steps share a bin if there are many. */

/** Values of `count` steps from `first` to `last`. */
export interface Bin {
	first: number;
	last: number;
	count: number;
	sum: number;
	least: number;
	most: number;
}

/** Most bins; a chart is narrower in units. */
const most = 1024;

export class Series {
	readonly #bins: Bin[] = [];
	/** Number of steps in a bin. */
	#width = 1;

	/** Adds a value; steps ascend. Values that are not finite are left out. */
	add(step: number, value: number): void {
		if (!Number.isFinite(value)) return;
		const bin = this.#bins.at(-1);
		if (bin && Math.floor(step / this.#width) === Math.floor(bin.first / this.#width)) {
			bin.last = step;
			bin.count++;
			bin.sum += value;
			bin.least = Math.min(bin.least, value);
			bin.most = Math.max(bin.most, value);
			return;
		}
		this.#bins.push({ first: step, last: step, count: 1, sum: value, least: value, most: value });
		if (this.#bins.length > most) this.#merge();
	}

	/** Removes the bins from `step` on, because a resumed run repeats these steps. */
	rewind(step: number): void {
		while (this.#bins.length > 0 && this.#bins.at(-1)!.first >= step) this.#bins.pop();
	}

	get bins(): readonly Readonly<Bin>[] {
		return this.#bins;
	}

	#merge(): void {
		this.#width *= 2;
		const halves = this.#bins.splice(0);
		for (const bin of halves) {
			const previous = this.#bins.at(-1);
			if (previous && Math.floor(bin.first / this.#width) === Math.floor(previous.first / this.#width)) {
				previous.last = bin.last;
				previous.count += bin.count;
				previous.sum += bin.sum;
				previous.least = Math.min(previous.least, bin.least);
				previous.most = Math.max(previous.most, bin.most);
			} else {
				this.#bins.push(bin);
			}
		}
	}
}

// Extremes and the median of any number of values; Math.max and Math.min take only some hundred thousand arguments.

/** The largest value; -Infinity without values. */
export const largestOf = (values: readonly number[]): number =>
	values.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);

/** The smallest value; Infinity without values. */
export const leastOf = (values: readonly number[]): number =>
	values.reduce((least, value) => Math.min(least, value), Number.POSITIVE_INFINITY);

/** The median, for an even number of values the mean of the two middle values; NaN without values. */
export function median(values: readonly number[]): number {
	const sorted = values.toSorted((a, b) => a - b);
	const middle = sorted.length >> 1;
	return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}
