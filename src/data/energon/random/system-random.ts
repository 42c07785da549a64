/**
 * The three generators of a process that user code draws from: torch's, numpy's and Python's. Energon seeds them with
 * the worker's seed when a worker starts and saves them with its state (docs/spec/energon.md §5.3).
 */
import { MersenneTwister, seedByArray, seedByInteger } from "./mersenne-twister.ts";
import { TorchGenerator } from "./torch-generator.ts";

/** `numpy.random.get_state()`: words, position and the kept second value of a pair of Gaussian draws. */
export interface NumpyState {
	readonly words: Uint32Array;
	readonly position: number;
	readonly hasGauss: number;
	readonly cachedGaussian: number;
}

/** numpy's legacy RandomState: the draws a task encoder may make, and its state. */
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

/** `random.getstate()`: 624 words and the position, and the kept second value of a Gaussian pair. */
interface PythonState {
	readonly words: Uint32Array;
	readonly position: number;
	readonly gaussNext: number | null;
}

/** Python's `random.Random`: the draws a task encoder or `prepare` may make, and its state. */
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

export interface SystemRandomState {
	readonly torch: TorchGenerator;
	readonly numpy: NumpyState;
	readonly python: PythonState;
}

export class SystemRandom {
	readonly torch: TorchGenerator;
	readonly numpy: NumpyGenerator;
	readonly python: PythonRandom;

	constructor(seed: number) {
		this.torch = new TorchGenerator(seed);
		this.numpy = new NumpyGenerator(seed);
		this.python = new PythonRandom(seed);
	}

	seed(seed: number): void {
		this.torch.manualSeed(seed);
		this.numpy.seed(seed);
		this.python.seed(seed);
	}

	state(): SystemRandomState {
		return { torch: this.torch.clone(), numpy: this.numpy.state(), python: this.python.state() };
	}

	restore(state: SystemRandomState): void {
		this.torch.assign(state.torch);
		this.numpy.restore(state.numpy);
		this.python.restore(state.python);
	}
}
