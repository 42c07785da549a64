/**
 * MT19937 (Matsumoto and Nishimura), the generator behind torch, numpy's RandomState and Python's random. State: 624
 * words and a position; the words are renewed when the position reaches 624.
 */

const N = 624;
const M = 397;

/** Words of `init_genrand(seed)`, with which torch and numpy seed. */
export function seedByInteger(seed: number): Uint32Array {
	const words = new Uint32Array(N);
	words[0] = seed >>> 0;
	for (let j = 1; j < N; j++) {
		const previous = words[j - 1]!;
		words[j] = (Math.imul(1812433253, previous ^ (previous >>> 30)) + j) >>> 0;
	}
	return words;
}

/** Words of `init_by_array(key)`, with which Python's random seeds. */
export function seedByArray(key: readonly number[]): Uint32Array {
	const words = seedByInteger(19650218);
	let i = 1;
	let j = 0;
	for (let k = Math.max(N, key.length); k > 0; k--) {
		const previous = words[i - 1]!;
		words[i] = (words[i]! ^ Math.imul(previous ^ (previous >>> 30), 1664525)) + key[j]! + j;
		i++;
		j++;
		if (i >= N) {
			words[0] = words[N - 1]!;
			i = 1;
		}
		if (j >= key.length) j = 0;
	}
	for (let k = N - 1; k > 0; k--) {
		const previous = words[i - 1]!;
		words[i] = (words[i]! ^ Math.imul(previous ^ (previous >>> 30), 1566083941)) - i;
		i++;
		if (i >= N) {
			words[0] = words[N - 1]!;
			i = 1;
		}
	}
	words[0] = 0x80000000;
	return words;
}

export class MersenneTwister {
	constructor(
		/** The 624 state words, which are never changed: copies of a generator share them until they are renewed. */
		public words: Uint32Array,
		/** Index of the next word; 624 = the words have to be renewed first. */
		public position: number = N,
	) {}

	clone(): MersenneTwister {
		return new MersenneTwister(this.words, this.position);
	}

	/** The next 32-bit output. */
	u32(): number {
		if (this.position >= N) {
			this.#renew();
			this.position = 0;
		}
		let y = this.words[this.position++]!;
		y ^= y >>> 11;
		y ^= (y << 7) & 0x9d2c5680;
		y ^= (y << 15) & 0xefc60000;
		y ^= y >>> 18;
		return y >>> 0;
	}

	#renew(): void {
		const words = this.words.slice();
		for (let k = 0; k < N; k++) {
			const y = (words[k]! & 0x80000000) | (words[(k + 1) % N]! & 0x7fffffff);
			words[k] = words[(k + M) % N]! ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
		}
		this.words = words;
	}
}
