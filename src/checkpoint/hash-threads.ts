/**
 * SHA-256 of byte streams, one after the other, on other threads than the one that has the bytes: while one thread catches up
 * with a stream, the next stream goes to another.
 */
import { openWorker } from "../native/worker.ts";
import { HashRing, SlotState, slotBytes, slotCount } from "./hash-ring.ts";

const threadCount = 2;
const digestBytes = 32;

/** One thread and the ring of slots before it. */
class HashThread implements Disposable {
	readonly #worker = openWorker("checkpoint/hash-worker");
	readonly #ring = new HashRing(HashRing.allocate());
	/** Of its streams, in order. */
	readonly #digests: string[] = [];
	#slot = 0;
	/** The slot that is lent. */
	#lent: number | null = null;
	#ended = 0;
	/** Bytes it was given. */
	given = 0;

	constructor() {
		this.#worker.postMessage(this.#ring.memory);
	}

	/** Memory for the next bytes: those that are then given from its beginning need no copy. */
	lend(): Uint8Array {
		this.#lent ??= this.#take();
		return this.#ring.slot(this.#lent);
	}

	update(bytes: Uint8Array): void {
		for (let offset = 0; offset < bytes.length; offset += slotBytes) {
			const part = bytes.subarray(offset, offset + slotBytes);
			const memory = this.lend();
			if (part.buffer !== memory.buffer || part.byteOffset !== memory.byteOffset) memory.set(part);
			this.#ring.set(this.#lent!, SlotState.bytes, part.length);
			this.#lent = null;
		}
		this.given += bytes.length;
	}

	/** The stream is over. Returns which of this thread's it was. */
	end(): number {
		this.#ring.set(this.#lent ?? this.#take(), SlotState.end);
		this.#lent = null;
		return this.#ended++;
	}

	/** Of all streams, when the thread has done them. */
	digests(): readonly string[] {
		// The last one is in the slot before the next: a whole turn finds it.
		for (let i = 0; this.#digests.length < this.#ended && i < slotCount; i++) this.#take();
		return this.#digests;
	}

	/** The next slot, when it is free; the digest that it held is kept. */
	#take(): number {
		const slot = this.#slot;
		this.#slot = (slot + 1) % slotCount;
		if (this.#ring.wait(slot, "writer") === SlotState.digest) {
			this.#digests.push(Buffer.from(this.#ring.slot(slot).slice(0, digestBytes)).toString("hex"));
			this.#ring.set(slot, SlotState.free);
		}
		return slot;
	}

	[Symbol.dispose](): void {
		this.#ring.set(this.#lent ?? this.#slot, SlotState.over);
		this.#worker.terminate();
	}
}

export class HashThreads implements Disposable {
	readonly #threads = Array.from({ length: threadCount }, () => new HashThread());
	/** Where every ended stream was hashed. */
	readonly #ended: { readonly thread: HashThread; readonly index: number }[] = [];
	#current: HashThread | null = null;

	/** Memory that the next bytes of the stream may be put into, from its beginning. */
	lend(): Uint8Array {
		return this.#stream.lend();
	}

	/** The next bytes of the stream; they are copied unless they lie in what was lent. */
	update(bytes: Uint8Array): void {
		this.#stream.update(bytes);
	}

	/** The stream is over; the next one begins. */
	end(): void {
		const thread = this.#stream;
		this.#ended.push({ thread, index: thread.end() });
		this.#current = null;
	}

	/** Digests of all ended streams in order, in hexadecimal, when the threads have done all. */
	digests(): string[] {
		return this.#ended.map(({ thread, index }) => thread.digests()[index]!);
	}

	/** The thread of the stream that goes on, or for one that begins the one that was given the least. */
	get #stream(): HashThread {
		this.#current ??= this.#threads.reduce((least, one) => (one.given < least.given ? one : least));
		return this.#current;
	}

	[Symbol.dispose](): void {
		for (const thread of this.#threads) thread[Symbol.dispose]();
	}
}
