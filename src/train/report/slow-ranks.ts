/** Names ranks that are slow: busy for longer than the others with the same work, in so many steps in a row. */

/** How much longer than the median of the others. */
const factor = 1.25;

interface Streak {
	steps: number;
	/** Seconds in the streak's steps: of the rank, and of the median of the others. */
	busy: number;
	others: number;
}

export class SlowRanks {
	readonly #streaks = new Map<number, Streak>();

	/** `groups`: ranks with the same work. `steps`: after how many a rank is named, once until it is fast again. */
	constructor(
		private readonly groups: readonly (readonly number[])[],
		private readonly steps: number,
	) {}

	/** Takes a step's seconds without waiting, by rank. Returns a sentence for every rank that is to be named now. */
	step(iteration: number, busy: readonly number[]): string[] {
		return this.groups.flatMap((ranks) => ranks.flatMap((rank) => this.#look(iteration, rank, ranks, busy)));
	}

	#look(iteration: number, rank: number, ranks: readonly number[], busy: readonly number[]): string[] {
		const own = busy[rank]!;
		const others = median(ranks.filter((one) => one !== rank).map((one) => busy[one]!));
		if (!(own > factor * others)) {
			this.#streaks.delete(rank);
			return [];
		}
		const streak = this.#streaks.get(rank) ?? { steps: 0, busy: 0, others: 0 };
		this.#streaks.set(rank, streak);
		streak.steps++;
		streak.busy += own;
		streak.others += others;
		if (streak.steps !== this.steps) return [];
		const mean = (seconds: number) => `${((1000 * seconds) / streak.steps).toFixed(1)} ms`;
		return [
			`Rank ${rank} is slow: in each of the ${streak.steps} steps up to ${iteration} it worked longer than ranks with the same work, ${mean(streak.busy)} on average, their median ${mean(streak.others)}.`,
		];
	}
}

/** NaN of no values. */
function median(values: readonly number[]): number {
	const sorted = values.toSorted((a, b) => a - b);
	const middle = sorted.length >> 1;
	return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}
