/** SHA-256 of a known number of byte streams, one after the other, on another thread than the one that has the bytes. */
import { openWorker } from "../native/worker.ts";
import { digestBytes, HashRing, SlotState, slotBytes, slotCount } from "./hash-ring.ts";

export class HashThread implements Disposable {
	readonly #worker = openWorker("checkpoint/hash-worker");
	readonly #ring: HashRing;
	#slot = 0;
	#ended = 0;

	/** `streams`: how many hashes there will be, at least one. */
	constructor(private readonly streams: number) {
		const memory = HashRing.allocate(streams);
		this.#ring = new HashRing(memory);
		this.#worker.postMessage(memory);
	}

	/** The next bytes of the stream; they are copied. */
	update(bytes: Uint8Array): void {
		for (let offset = 0; offset < bytes.length; offset += slotBytes) {
			const part = bytes.subarray(offset, offset + slotBytes);
			const slot = this.#take();
			this.#ring.slot(slot).set(part);
			this.#ring.set(slot, SlotState.bytes, part.length);
		}
	}

	/** The stream is over; the next one begins. */
	end(): void {
		this.#ring.set(this.#take(), SlotState.end, 0, this.#ended++);
	}

	/** Digests of all streams in order, in hexadecimal, when the thread has done all. */
	digests(): string[] {
		if (this.#ended !== this.streams) throw new Error(`${this.#ended} of ${this.streams} hashed streams have ended.`);
		for (let slot = 0; slot < slotCount; slot++) this.#ring.wait(slot, SlotState.free, "reached");
		return Array.from({ length: this.streams }, (_, index) =>
			Buffer.from(this.#ring.digests.slice(index * digestBytes, (index + 1) * digestBytes)).toString("hex"),
		);
	}

	#take(): number {
		const slot = this.#slot;
		this.#slot = (slot + 1) % slotCount;
		this.#ring.wait(slot, SlotState.free, "reached");
		return slot;
	}

	[Symbol.dispose](): void {
		this.#worker.terminate();
	}
}
