/**
 * Files of the host. A guard ends a process whose main thread reads data when a read does not return, which the main thread itself
 * cannot notice; space for a file can be reserved.
 */
import { dlopen } from "bun:ffi";
import { NativeError, UserError } from "../system/errors.ts";
import { newReadWatch, showReads } from "../system/read-watch.ts";
import { openWorker } from "../system/worker.ts";
import { Status } from "./abi.ts";
import type { Library } from "./library.ts";

/** A message to the guarding thread; null: there is nothing to guard now. */
export type Guarded = { readonly watch: SharedArrayBuffer; readonly milliseconds: number } | null;

/** Of this process, once it is needed. */
let thread: Worker | null = null;

function post(message: Guarded): void {
	if (thread === null) {
		thread = openWorker("native/read-guard-worker");
		thread.unref();
	}
	thread.postMessage(message);
}

/** Until it is disposed, a read of this thread of more than `milliseconds` ends the process with a sentence that names the file. */
export class ReadGuard implements Disposable {
	constructor(milliseconds: number) {
		const watch = newReadWatch();
		post({ watch, milliseconds });
		showReads(watch);
	}

	[Symbol.dispose](): void {
		showReads(null);
		post(null);
	}
}

let libc: ReturnType<typeof open> | null = null;

function open() {
	return dlopen("libc.so.6", { fallocate: { args: ["i32", "i32", "i64", "i64"], returns: "i32" } });
}

/**
 * Preallocates `bytes` bytes of a file from `position` on, which extends it. Writing is then about twice as fast, because the
 * file system allocates once and not page by page. Returns whether it has: if the file system cannot, or is full, the writes proceed
 * or fail by themselves.
 */
export function reserve(descriptor: number, position: number, bytes: number): boolean {
	libc ??= open();
	return libc.symbols.fallocate(descriptor, 0, position, bytes) === 0;
}

// SHA-256 of the ranges of a file that is being written, on a thread of the native library (cuda/include/mimo/digests.h).

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
