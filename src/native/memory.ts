/** Device memory with an explicit owner count. The garbage collector never frees device memory. */

/** A block of device memory; freed when the last owner releases it. Made by Device.allocate. */
export class Allocation {
	#references = 1;
	/** null: suspended. */
	#address: number | null;
	/** The block whose memory this one has taken over since it was suspended. */
	#source: Allocation | null = null;

	constructor(
		readonly bytes: number,
		address: number,
		private readonly free: (address: number) => void,
	) {
		this.#address = address;
	}

	/** Known to src/native alone. */
	get address(): number {
		if (this.#references === 0) throw new Error("An operation was given device memory that was released.");
		if (this.#address === null) throw new Error("An operation was given device memory whose contents are suspended.");
		return this.#address;
	}

	get references(): number {
		return this.#references;
	}

	/** Another owner. */
	retain(): this {
		if (this.#references === 0) throw new Error("Device memory was retained after its last owner released it.");
		this.#references++;
		return this;
	}

	release(): void {
		if (this.#references === 0) throw new Error("Device memory was released twice.");
		if (--this.#references === 0) this.#giveBack();
	}

	/** Gives the memory back, and its contents up, though owners remain: until resumeFrom nothing may read it. */
	suspend(): void {
		if (this.#references === 0 || this.#address === null) throw new Error("Device memory was suspended twice.");
		this.#giveBack();
	}

	/** Goes on as the memory of `source`, which has as many bytes, for the owners that remain. */
	resumeFrom(source: Allocation): void {
		if (this.#address !== null || source.bytes !== this.bytes) {
			throw new Error(`A block of ${this.bytes} bytes cannot go on as one of ${source.bytes}.`);
		}
		if (this.#references === 0) return;
		this.#source = source.retain();
		this.#address = source.address;
	}

	#giveBack(): void {
		if (this.#source !== null) this.#source.release();
		else if (this.#address !== null) this.free(this.#address);
		this.#source = null;
		this.#address = null;
	}
}

/** Anything that names a place in device memory: tensors do. */
export interface DeviceMemory {
	readonly allocation: Allocation;
	readonly byteOffset: number;
}

/** Address of a place; throws for memory that is released or suspended. For src/native only. */
export function addressOf(memory: DeviceMemory | null | undefined): number {
	if (memory == null) return 0;
	return memory.allocation.address + memory.byteOffset;
}
