/** Python's `random.Random`: the draws a task encoder or `prepare` may make, and its state. */
import { MersenneTwister, seedByArray } from "./mersenne-twister.ts";

/** `random.getstate()`: 624 words and the position, and the kept second value of a Gaussian pair. */
export interface PythonState {
	readonly words: Uint32Array;
	readonly position: number;
	readonly gaussNext: number | null;
}

export class PythonRandom {
	#engine: MersenneTwister;
	#gauss: number | null = null;

	constructor(seed: number) {
		this.#engine = new MersenneTwister(seedByArray(keyOf(seed)));
	}

	seed(seed: number): void {
		this.#engine = new MersenneTwister(seedByArray(keyOf(seed)));
		this.#gauss = null;
	}

	/** `random()`: a float64 of [0, 1). */
	random(): number {
		return this.#engine.double53();
	}

	/** `randint(low, high)`: an integer of [low, high]. */
	randint(low: number, high: number): number {
		return low + this.below(high - low + 1);
	}

	/** An integer of [0, bound): draws as many bits as the bound has, until the value is below the bound. */
	below(bound: number): number {
		const bits = 32 - Math.clz32(bound);
		for (;;) {
			const value = this.#engine.u32() >>> (32 - bits);
			if (value < bound) return value;
		}
	}

	/** Shuffles the list in place. */
	shuffle<Item>(items: Item[]): void {
		for (let i = items.length - 1; i > 0; i--) {
			const j = this.below(i + 1);
			const kept = items[i]!;
			items[i] = items[j]!;
			items[j] = kept;
		}
	}

	/** `sample(population, count)`: distinct elements in the order drawn. */
	sample<Item>(population: readonly Item[], count: number): Item[] {
		const n = population.length;
		const smallSet = 21 + (count > 5 ? 4 ** Math.ceil(Math.log(count * 3) / Math.log(4)) : 0);
		if (n <= smallSet) {
			const pool = [...population];
			return Array.from({ length: count }, (_, i) => {
				const j = this.below(n - i);
				const drawn = pool[j]!;
				pool[j] = pool[n - i - 1]!;
				return drawn;
			});
		}
		const taken = new Set<number>();
		return Array.from({ length: count }, () => {
			let j = this.below(n);
			while (taken.has(j)) j = this.below(n);
			taken.add(j);
			return population[j]!;
		});
	}

	state(): PythonState {
		return { words: this.#engine.words, position: this.#engine.position, gaussNext: this.#gauss };
	}

	restore(state: PythonState): void {
		this.#engine = new MersenneTwister(state.words, state.position);
		this.#gauss = state.gaussNext;
	}
}

/** The 32-bit digits of a seed, lowest first; zero has a single digit. */
function keyOf(seed: number): number[] {
	const key: number[] = [];
	for (let rest = Math.abs(seed); rest > 0; rest = Math.floor(rest / 4294967296)) key.push(rest % 4294967296);
	return key.length === 0 ? [0] : key;
}
