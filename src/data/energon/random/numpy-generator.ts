/** numpy's legacy RandomState: the draws a task encoder may make, and its state. */
import { MersenneTwister, seedByInteger } from "./mersenne-twister.ts";

/** `numpy.random.get_state()`: words, position and the kept second value of a pair of Gaussian draws. */
export interface NumpyState {
	readonly words: Uint32Array;
	readonly position: number;
	readonly hasGauss: number;
	readonly cachedGaussian: number;
}

export class NumpyGenerator {
	#engine: MersenneTwister;
	#gauss: number | null = null;

	constructor(seed: number) {
		this.#engine = new MersenneTwister(seedByInteger(seed));
	}

	seed(seed: number): void {
		this.#engine = new MersenneTwister(seedByInteger(seed));
		this.#gauss = null;
	}

	/** `random_sample()`: a float64 of [0, 1). */
	randomSample(): number {
		return this.#engine.double53();
	}

	/** `randint(low, high)`: an integer of [low, high), by masking and rejection; bounds have at most 32 bits. */
	randint(low: number, high: number): number {
		return low + this.#interval(high - low - 1);
	}

	/** `permutation(count)`. */
	permutation(count: number): number[] {
		const order = Array.from({ length: count }, (_, i) => i);
		for (let i = count - 1; i > 0; i--) {
			const j = this.#interval(i);
			const kept = order[i]!;
			order[i] = order[j]!;
			order[j] = kept;
		}
		return order;
	}

	/** `standard_normal()` by the polar method; the second value of a pair is kept. */
	standardNormal(): number {
		if (this.#gauss !== null) {
			const kept = this.#gauss;
			this.#gauss = null;
			return kept;
		}
		for (;;) {
			const x1 = 2 * this.#engine.double53() - 1;
			const x2 = 2 * this.#engine.double53() - 1;
			const r2 = x1 * x1 + x2 * x2;
			if (r2 >= 1 || r2 === 0) continue;
			const f = Math.sqrt((-2 * Math.log(r2)) / r2);
			this.#gauss = f * x1;
			return f * x2;
		}
	}

	/** An integer of [0, max] from masked 32-bit draws. */
	#interval(max: number): number {
		if (max === 0) return 0;
		let mask = max;
		for (let shift = 1; shift <= 16; shift *= 2) mask |= mask >>> shift;
		mask >>>= 0;
		for (;;) {
			const value = (this.#engine.u32() & mask) >>> 0;
			if (value <= max) return value;
		}
	}

	state(): NumpyState {
		return {
			words: this.#engine.words,
			position: this.#engine.position,
			hasGauss: this.#gauss === null ? 0 : 1,
			cachedGaussian: this.#gauss ?? 0,
		};
	}

	restore(state: NumpyState): void {
		this.#engine = new MersenneTwister(state.words, state.position);
		this.#gauss = state.hasGauss === 0 ? null : state.cachedGaussian;
	}
}
