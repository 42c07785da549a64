/** Shared memory between a writer and the thread that hashes for it: slots of bytes, taken in turn. */

export const slotBytes = 2 ** 20;
export const slotCount = 16;
export const digestBytes = 32;

/** What a slot holds; the words after its state are a length and, for `end`, where the digest goes. */
export const SlotState = { free: 0, bytes: 1, end: 2 } as const;
const wordsPerSlot = 4;

/** Both sides make one over the same memory. */
export class HashRing {
	readonly words: Int32Array;
	readonly digests: Uint8Array;
	readonly #bytes: Uint8Array;

	constructor(readonly memory: SharedArrayBuffer) {
		const headBytes = slotCount * wordsPerSlot * 4;
		this.words = new Int32Array(memory, 0, slotCount * wordsPerSlot);
		this.#bytes = new Uint8Array(memory, headBytes, slotCount * slotBytes);
		this.digests = new Uint8Array(memory, headBytes + slotCount * slotBytes);
	}

	/** Memory for a ring of `digests` hashes. */
	static allocate(digests: number): SharedArrayBuffer {
		return new SharedArrayBuffer(slotCount * (wordsPerSlot * 4 + slotBytes) + digests * digestBytes);
	}

	/** Index of a slot's state among the words. */
	stateAt(slot: number): number {
		return slot * wordsPerSlot;
	}

	slot(slot: number): Uint8Array {
		return this.#bytes.subarray(slot * slotBytes, (slot + 1) * slotBytes);
	}

	/** Waits until a slot's state is, or is no longer, `state`; returns the state. */
	wait(slot: number, state: number, until: "reached" | "left"): number {
		const at = this.stateAt(slot);
		for (;;) {
			const now = Atomics.load(this.words, at);
			if ((now === state) === (until === "reached")) return now;
			Atomics.wait(this.words, at, now, 1000);
		}
	}

	set(slot: number, state: number, length = 0, target = 0): void {
		const at = this.stateAt(slot);
		this.words[at + 1] = length;
		this.words[at + 2] = target;
		Atomics.store(this.words, at, state);
		Atomics.notify(this.words, at);
	}
}
