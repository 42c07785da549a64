/**
 * torch's CPU generator and the draws Energon makes from it (docs/spec/energon.md §3.2): integers without rejection,
 * float32 uniforms from the low 24 bits, in-place permutations, and a choice by cumulative float32 weights.
 */
import { UserError } from "../../../system/errors.ts";
import { MersenneTwister, seedByInteger } from "./mersenne-twister.ts";

/** Bytes of `torch.Generator.get_state()` on the CPU. */
const TORCH_STATE_BYTES = 5056;

/** From this bound on torch draws 64 bits. */
const WIDE_BOUND = 2 ** 28;

/** Cumulative float32 weights, summed in double and rounded at every step. */
export function cumulative(weights: Float32Array): Float32Array {
	let sum = 0;
	return weights.map((weight) => {
		sum += weight;
		return sum;
	});
}

export class TorchGenerator {
	#engine!: MersenneTwister;
	#seed!: number;

	/** `seed` null: the state has to be set before use. */
	constructor(seed: number | null) {
		if (seed !== null) this.manualSeed(seed);
	}

	/** A generator with a state of 5056 bytes, little endian. Throws a UserError for an invalid state. */
	static fromState(bytes: Uint8Array): TorchGenerator {
		const generator = new TorchGenerator(null);
		generator.restore(bytes);
		return generator;
	}

	manualSeed(seed: number): void {
		this.#seed = seed;
		this.#engine = new MersenneTwister(seedByInteger(seed));
	}

	u32(): number {
		return this.#engine.u32();
	}

	/** An integer of [0, bound) from one 32-bit draw, or from two where the bound is 2^28 or more; without rejection. */
	below(bound: number): number {
		if (bound < WIDE_BOUND) return this.u32() % bound;
		const high = this.u32();
		const low = this.u32();
		return Number(((BigInt(high) << 32n) | BigInt(low)) % BigInt(bound));
	}

	/** A float32 of [0, 1). */
	unit(): number {
		return (this.u32() & 0xffffff) / 16777216;
	}

	/** A permutation of 0 … count-1. */
	permutation(count: number): number[] {
		const order = Array.from({ length: count }, (_, i) => i);
		for (let i = 0; i < count - 1; i++) {
			const j = i + (this.u32() % (count - i));
			const kept = order[i]!;
			order[i] = order[j]!;
			order[j] = kept;
		}
		return order;
	}

	/** Draws an index by cumulative weights: the first entry not below a uniform draw times the last one. */
	choiceByCumulative(sums: Float32Array): number {
		if (sums.length === 1) return 0;
		const value = Math.fround(this.unit() * sums[sums.length - 1]!);
		const drawn = sums.findIndex((sum) => sum >= value);
		return drawn < 0 ? sums.length - 1 : drawn;
	}

	/** Another generator in the same state. */
	clone(): TorchGenerator {
		const copy = new TorchGenerator(null);
		copy.assign(this);
		return copy;
	}

	/** Copies the state of another generator. */
	assign(other: TorchGenerator): void {
		this.#seed = other.#seed;
		this.#engine = other.#engine.clone();
	}

	/** The generator's state in torch's format. */
	state(): Uint8Array {
		const bytes = new Uint8Array(TORCH_STATE_BYTES);
		const view = new DataView(bytes.buffer);
		view.setBigUint64(0, BigInt(this.#seed), true);
		const { words, position } = this.#engine;
		// torch's `left` counts down to 1 before a renewal; then `next` is 0 only if no number was drawn yet.
		const fresh = position === 624 && this.#untouched();
		view.setInt32(8, fresh ? 1 : 625 - position, true);
		view.setInt32(12, 1, true);
		view.setBigUint64(16, BigInt(fresh ? 0 : position), true);
		for (let i = 0; i < 624; i++) view.setBigUint64(24 + 8 * i, BigInt(words[i]!), true);
		return bytes;
	}

	/** Whether the words are still those of the seed. */
	#untouched(): boolean {
		return this.#engine.words[0] === this.#seed >>> 0 && this.#engine.words[1] === seedByInteger(this.#seed)[1];
	}

	restore(bytes: Uint8Array): void {
		if (bytes.byteLength !== TORCH_STATE_BYTES) {
			throw new UserError(`A torch generator state has ${TORCH_STATE_BYTES} bytes; this one has ${bytes.byteLength}.`);
		}
		const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
		const left = view.getInt32(8, true);
		const next = Number(view.getBigUint64(16, true));
		if (left < 1 || left > 624 || next > 624 || (left > 1 && next !== 625 - left)) {
			throw new UserError(`A torch generator state is damaged: left ${left}, next ${next}.`);
		}
		const words = new Uint32Array(624);
		for (let i = 0; i < 624; i++) words[i] = view.getUint32(24 + 8 * i, true);
		this.#seed = Number(view.getBigUint64(0, true));
		this.#engine = new MersenneTwister(words, left === 1 ? 624 : next);
	}
}
