/** Device memory with an explicit owner count. The garbage collector never frees device memory. */

/** A block of device memory; freed when the last owner releases it. Made by Device.allocate. */
export class Allocation {
	#references = 1;

	constructor(
		readonly bytes: number,
		/** Known to src/native alone. */
		readonly address: number,
		private readonly free: (allocation: Allocation) => void,
	) {}

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
		if (--this.#references === 0) this.free(this);
	}
}

/** Anything that names a place in device memory: tensors do. */
export interface DeviceMemory {
	readonly allocation: Allocation;
	readonly byteOffset: number;
}

/** Address of a place; throws for released memory. For src/native only. */
export function addressOf(memory: DeviceMemory | null | undefined): number {
	if (memory == null) return 0;
	if (memory.allocation.references === 0) throw new Error("An operation was given device memory that was released.");
	return memory.allocation.address + memory.byteOffset;
}
