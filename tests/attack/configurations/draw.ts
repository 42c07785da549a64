/** Numbers and choices drawn from a seed, and the flags that they become. */
import { numbersFrom } from "../../../src/parity/verify/samples.ts";

/** Values of configuration keys as flags spell them. */
export type Flags = Readonly<Record<string, string>>;

export class Draw {
	readonly #next: () => number;

	constructor(seed: number) {
		this.#next = numbersFrom(seed);
	}

	chance(probability: number): boolean {
		return this.#next() < probability;
	}

	one<Value>(values: readonly Value[]): Value {
		return values[Math.floor(this.#next() * values.length)]!;
	}

	/** A whole number from `least` to `most`. */
	whole(least: number, most: number): number {
		return least + Math.floor(this.#next() * (most - least + 1));
	}

	/** `flags` with a probability, or none. */
	sometimes(probability: number, flags: () => Flags): Flags {
		return this.chance(probability) ? flags() : {};
	}
}

export function argumentsOf(flags: Flags): string[] {
	return Object.entries(flags).map(([key, value]) => `--${key}=${value}`);
}

/** A switch that is turned on. */
export const on = "true";
