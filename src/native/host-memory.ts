/** Contents of device memory that wait in the host's memory, copied there and back beside the device's other work. */
import type { Device, DeviceEvent, Stream } from "./device.ts";
import type { NativeFunction } from "./library.ts";
import type { Allocation } from "./memory.ts";

type Call = (name: string, ...args: Parameters<NativeFunction>) => void;

/**
 * Copies that may leave the device at once: the device waits for an older one, and has its memory back, when a newer one
 * starts.
 */
const leavingAtOnce = 2;

/** Blocks of the host's memory. Their copies share a stream, so that a copy may write to a block that an earlier copy reads. */
export class HostMemory implements Disposable {
	readonly #stream: Stream;
	/** Addresses of blocks that hold nothing, by their bytes: steps need the same sizes again. */
	readonly #unused = new Map<number, number[]>();
	readonly #leaving: HostCopy[] = [];
	/** The newest copy of every owner. */
	readonly #newest = new WeakMap<object, HostCopy>();

	constructor(
		readonly device: Device,
		private readonly call: Call,
	) {
		this.#stream = device.createStream("host copies");
	}

	/**
	 * Starts to copy the contents of a block to the host, after the work queued so far; the block is suspended when that is done.
	 * No work queued from now on may read it until the copy is restored. Copies of one `owner` are restored newest first.
	 */
	keep(allocation: Allocation, owner: object): HostCopy {
		const copy = new HostCopy(this, allocation, this.#newest.get(owner) ?? null);
		this.#newest.set(owner, copy);
		if (this.#leaving.push(copy) > leavingAtOnce) this.#leaving[0]!.leave();
		return copy;
	}

	/** For HostCopy: the copy is no longer on its way to the host. */
	left(copy: HostCopy): void {
		const at = this.#leaving.indexOf(copy);
		if (at >= 0) this.#leaving.splice(at, 1);
	}

	/** For HostCopy: copies when the device's work so far is done; `done` marks the copy's end. */
	copy(to: number, from: number, bytes: number, done: DeviceEvent): void {
		done.record(this.device.stream);
		this.device.wait(done, this.#stream);
		this.call("mimo_host_copy", this.#stream.handle, to, from, bytes);
		done.record(this.#stream);
	}

	/** For HostCopy: the address of a block of the host. */
	take(bytes: number): number {
		const unused = this.#unused.get(bytes)?.pop();
		if (unused !== undefined) return unused;
		const out = new BigUint64Array(1);
		this.call("mimo_host_allocate", this.device.handle, bytes, out);
		return Number(out[0]);
	}

	giveBack(address: number, bytes: number): void {
		const unused = this.#unused.get(bytes);
		if (unused) unused.push(address);
		else this.#unused.set(bytes, [address]);
	}

	/** Frees the blocks that hold nothing; their copies are done. */
	[Symbol.dispose](): void {
		for (const address of [...this.#unused.values()].flat()) this.call("mimo_host_free", this.device.handle, address);
		this.#unused.clear();
	}
}

/** Contents of a block of device memory that are on their way to the host, there, or on their way back. */
class HostCopy implements Disposable {
	readonly #address: number;
	/** The end of the last copy. */
	readonly #done: DeviceEvent;
	#state: "leaving" | "away" | "returning" | "restored" = "leaving";
	/** Where the contents return to. */
	#fresh: Allocation | null = null;

	constructor(
		private readonly memory: HostMemory,
		private readonly allocation: Allocation,
		/** The owner's copy before this one, which is restored after it. */
		private readonly earlier: HostCopy | null,
	) {
		allocation.retain();
		this.#address = memory.take(allocation.bytes);
		this.#done = memory.device.createEvent();
		memory.copy(this.#address, allocation.address, allocation.bytes, this.#done);
	}

	/** Gives the block's memory back to the device, whose later work waits for the copy. */
	leave(): void {
		this.memory.left(this);
		this.memory.device.wait(this.#done);
		const wanted = this.allocation.references > 1;
		if (wanted) this.allocation.suspend();
		this.allocation.release();
		this.#state = wanted ? "away" : "restored";
	}

	/** Starts the way back. */
	request(): void {
		if (this.#state !== "away") return;
		this.#state = "returning";
		this.#fresh = this.memory.device.allocate(this.allocation.bytes, "activation");
		this.memory.copy(this.#fresh.address, this.#address, this.allocation.bytes, this.#done);
	}

	/** The block has its contents again for the device's later work; those that are restored next start their way back. */
	restore(): void {
		if (this.#state === "leaving") {
			// The contents are still in place.
			this.memory.left(this);
			this.allocation.release();
		} else if (this.#state !== "restored") {
			this.request();
			this.memory.device.wait(this.#done);
			this.allocation.resumeFrom(this.#fresh!);
			this.#fresh!.release();
		}
		this.#state = "restored";
		this.earlier?.request();
	}

	[Symbol.dispose](): void {
		if (this.#state === "leaving") this.leave();
		if (this.#state === "returning") {
			this.memory.device.wait(this.#done);
			this.#fresh!.release();
		}
		this.memory.giveBack(this.#address, this.allocation.bytes);
		this.#done[Symbol.dispose]();
	}
}
