/** Python's `random.Random`, by which the Python package shuffles tars. */
import { MersenneTwister, seedByArray } from "./mersenne-twister.ts";

export class PythonRandom {
	readonly #engine: MersenneTwister;

	constructor(seed: number) {
		this.#engine = new MersenneTwister(seedByArray(keyOf(seed)));
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
}

/** The 32-bit digits of a seed, lowest first; zero has a single digit. */
function keyOf(seed: number): number[] {
	const key: number[] = [];
	for (let rest = Math.abs(seed); rest > 0; rest = Math.floor(rest / 4294967296)) key.push(rest % 4294967296);
	return key.length === 0 ? [0] : key;
}
