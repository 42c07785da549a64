/** SHA-256 of the ranges of a file that is being written, on a thread of the native library (cuda/include/mimo/digests.h). */

import { NativeError, UserError } from "../system/errors.ts";
import { Status } from "./abi.ts";
import type { Library } from "./library.ts";

/** A single thread hashes two ranges at once, faster than files are written. */
const threads = 1;
const sumBytes = 32;

export class FileDigests implements Disposable {
	#handle: number | null;
	#ranges = 0;

	/** `file` is open for reading and stays so until this is disposed; ranges begin at its `position`. */
	constructor(
		private readonly library: Library,
		private readonly file: { readonly path: string; readonly descriptor: number; readonly position: number },
	) {
		const handle = new BigUint64Array(1);
		this.#call("mimo_digests_open", file.descriptor, file.position, threads, handle);
		this.#handle = Number(handle[0]);
	}

	/** The next range has `bytes` bytes. */
	range(bytes: number): void {
		this.#call("mimo_digests_range", this.#handle, bytes);
		this.#ranges++;
	}

	/** The file's bytes below `position` are written. */
	written(position: number): void {
		this.#call("mimo_digests_written", this.#handle, position);
	}

	/** Waits for the sums of all ranges, in hexadecimal; their bytes must have been written. */
	wait(): string[] {
		const sums = Buffer.alloc(Math.max(1, this.#ranges) * sumBytes);
		this.#call("mimo_digests_wait", this.#handle, sums, this.#ranges * sumBytes);
		return Array.from({ length: this.#ranges }, (_, i) => sums.toString("hex", i * sumBytes, (i + 1) * sumBytes));
	}

	#call(name: string, ...args: (number | NodeJS.TypedArray | null)[]): void {
		const status = this.library.symbols[name]!(...args) as number;
		if (status === Status.ok) return;
		if (status === Status.data) throw new UserError(`Cannot read back ${this.file.path}: it lacks what was written.`);
		throw new NativeError(name, status, String(this.library.symbols.mimo_last_error!()));
	}

	[Symbol.dispose](): void {
		if (this.#handle !== null) this.#call("mimo_digests_close", this.#handle);
		this.#handle = null;
	}
}
