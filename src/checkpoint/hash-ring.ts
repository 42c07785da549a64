/** Shared memory between a writer and a thread that hashes for it: slots of bytes, taken in turn. */

export const slotBytes = 2 ** 18;
/** So many bytes may wait: an expert of usual size, handed over whole, leaves room for the next one elsewhere. */
export const slotCount = 64;

/** What a slot holds: the writer's bytes, a stream's end, the digest that answers it, or that there is no more. */
export const SlotState = { free: 0, bytes: 1, end: 2, digest: 3, over: 4 } as const;
const wordsPerSlot = 2;

/** Both sides make one over the same memory. */
export class HashRing {
	readonly #words: Int32Array;
	readonly #bytes: Uint8Array;

	constructor(readonly memory: SharedArrayBuffer) {
		const headBytes = slotCount * wordsPerSlot * 4;
		this.#words = new Int32Array(memory, 0, slotCount * wordsPerSlot);
		this.#bytes = new Uint8Array(memory, headBytes, slotCount * slotBytes);
	}

	static allocate(): SharedArrayBuffer {
		return new SharedArrayBuffer(slotCount * (wordsPerSlot * 4 + slotBytes));
	}

	slot(slot: number): Uint8Array {
		return this.#bytes.subarray(slot * slotBytes, (slot + 1) * slotBytes);
	}

	/** Bytes that the writer has put into a slot. */
	lengthOf(slot: number): number {
		return this.#words[slot * wordsPerSlot + 1]!;
	}

	/** Waits until a slot is the writer's (free, or holding a digest), or the hasher's; returns its state. */
	wait(slot: number, whose: "writer" | "hasher"): number {
		const at = slot * wordsPerSlot;
		for (;;) {
			const now = Atomics.load(this.#words, at);
			const writers = now === SlotState.free || now === SlotState.digest;
			if (writers === (whose === "writer")) return now;
			Atomics.wait(this.#words, at, now, 1000);
		}
	}

	set(slot: number, state: number, length = 0): void {
		const at = slot * wordsPerSlot;
		this.#words[at + 1] = length;
		Atomics.store(this.#words, at, state);
		Atomics.notify(this.#words, at);
	}
}
