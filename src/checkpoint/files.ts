/**
 * Pools of open files, and files that are either whole or not there: temporary name, fsync, rename, fsync of the folder
 * (docs/spec/checkpoint.md §7). Every failure is one sentence that names the file.
 */
import { createHash } from "node:crypto";
import { closeSync, constants, fsyncSync, openSync, renameSync, rmSync, writeSync } from "node:fs";
import { dirname } from "node:path";
import { reserve } from "../native/files.ts";
import { UserError } from "../system/errors.ts";
import { InputFile } from "../system/input-file.ts";
import { fileError } from "../system/system-errors.ts";
import { openWorker } from "../system/worker.ts";

/** Largest write of one system call; the kernel cuts larger ones at 2 GiB. */
const LARGEST_TRANSFER = 2 ** 30;

/** Open files at once; systems allow some thousand a process. */
const LARGEST_POOL = 64;

/** Bytes of a file that are hashed at once. */
const HASHED = 2 ** 24;

/** Digest of a file's bytes, after those of `before`, in hexadecimal. */
export function fileDigest(path: string, algorithm: "sha256" | "sha1" | "md5", before = ""): string {
	const hash = createHash(algorithm).update(before);
	using file = InputFile.open(path);
	for (let at = 0; at < file.size; at += HASHED) hash.update(file.read(at, Math.min(HASHED, file.size - at)));
	return hash.digest("hex");
}

/** Files opened when needed and closed when too many are open. */
export class FilePool<File extends Disposable> implements Disposable {
	readonly #open = new Map<string, File>();

	constructor(private readonly open: (name: string) => File) {}

	/** Valid until the next call. */
	get(name: string): File {
		let file = this.#open.get(name);
		if (file) this.#open.delete(name);
		else {
			file = this.open(name);
			if (this.#open.size >= LARGEST_POOL) {
				const [oldest, opened] = this.#open.entries().next().value!;
				opened[Symbol.dispose]();
				this.#open.delete(oldest);
			}
		}
		// The last of the map is the one used last.
		this.#open.set(name, file);
		return file;
	}

	[Symbol.dispose](): void {
		for (const file of this.#open.values()) file[Symbol.dispose]();
		this.#open.clear();
	}
}

/** Fewer bytes are written at once as they come. */
const LARGE = 2 ** 20;

/** Bytes of a file after which they begin to be brought to the disk while more is written. */
const WRITE_BACK = 2 ** 27;

/** Whether bytes are on the disk when a write is reported done, or the system may bring them there later. */
export interface Durability {
	/** Default: true. */
	readonly sync?: boolean | undefined;
}

/** A file that is written from front to back, or from where it is sought. Must be closed (durably, unless `sync` is false) or disposed. */
export class OutputFile implements Disposable {
	#fd: number | null;
	#position = 0;
	#unsynced = 0;
	/** Background write-back of a large file; null for a small one. */
	#writeBack: WriteBack | null = null;

	readonly #sync: boolean;

	/** Creates `path`, which must not exist; or opens it, where it is there as another process made it. */
	constructor(
		readonly path: string,
		{ sync = true, there = false }: Durability & { readonly there?: boolean } = {},
	) {
		this.#sync = sync;
		try {
			this.#fd = openSync(path, there ? "r+" : "wx+");
		} catch (error) {
			throw fileError("create", path, error);
		}
	}

	/** Where the next byte goes. */
	get position(): number {
		return this.#position;
	}

	seek(position: number): void {
		this.#position = position;
	}

	/** A descriptor with which written bytes are read back, until the file is closed. */
	get descriptor(): number {
		if (this.#fd === null) throw new Error(`${this.path} is closed.`);
		return this.#fd;
	}

	/** Says that `bytes` bytes will follow: a large file is written faster into room that it has already. */
	expect(bytes: number): void {
		if (bytes >= LARGE) reserve(this.descriptor, this.#position, bytes);
	}

	write(bytes: Uint8Array): void {
		if (this.#fd === null) throw new Error(`${this.path} is closed.`);
		for (let done = 0; done < bytes.byteLength; ) {
			try {
				const length = Math.min(bytes.byteLength - done, LARGEST_TRANSFER);
				done += writeSync(this.#fd, bytes, done, length, this.#position + done);
			} catch (error) {
				throw fileError("write", this.path, error);
			}
		}
		this.#position += bytes.byteLength;
		this.#unsynced += bytes.byteLength;
		if (this.#sync && this.#unsynced >= WRITE_BACK) {
			this.#unsynced = 0;
			this.#writeBack ??= new WriteBack(this.#fd);
			this.#writeBack.ask();
		}
	}

	/** fsync and close. A failure is final: it is unknown which part of the file reached the disk. */
	close(): void {
		if (this.#fd === null) return;
		const fd = this.#fd;
		this.#fd = null;
		try {
			// A failure that another thread was told of, and this one would not learn about.
			if (!this.#endWriteBack()) throw Object.assign(new Error("fsync failed"), { code: "EIO" });
			if (this.#sync) fsyncSync(fd);
		} catch (error) {
			closeSync(fd);
			throw fileError("write", this.path, error);
		}
		closeSync(fd);
	}

	#endWriteBack(): boolean {
		const good = this.#writeBack?.end() ?? true;
		this.#writeBack = null;
		return good;
	}

	[Symbol.dispose](): void {
		if (this.#fd === null) return;
		this.#endWriteBack();
		closeSync(this.#fd);
		this.#fd = null;
	}
}

/** Makes names created in or removed from a folder durable. */
export function syncFolder(path: string, { sync = true }: Durability = {}): void {
	if (!sync) return;
	let fd: number;
	try {
		fd = openSync(path, constants.O_RDONLY | constants.O_DIRECTORY);
	} catch (error) {
		throw fileError("open", path, error);
	}
	try {
		fsyncSync(fd);
	} catch (error) {
		throw fileError("write", path, error);
	} finally {
		closeSync(fd);
	}
}

/** A name beside `path` that no other process uses. */
export function temporaryName(path: string): string {
	return `${path}.tmp-${process.pid.toString(36)}${crypto.randomUUID().slice(0, 8)}`;
}

/** Gives `write` a new file that becomes `path` when it is complete and on disk; on a failure nothing is left. */
export function writeFileAtomically<T>(path: string, write: (file: OutputFile) => T, durability: Durability = {}): T {
	const temporary = temporaryName(path);
	let result: T;
	try {
		using file = new OutputFile(temporary, durability);
		result = write(file);
		file.close();
		renameSync(temporary, path);
	} catch (error) {
		rmSync(temporary, { force: true });
		if (error instanceof UserError || (error as NodeJS.ErrnoException).code === undefined) throw error;
		throw fileError("write", path, error);
	}
	syncFolder(dirname(path), durability);
	return result;
}

// Brings the written part of a large file to the disk while the rest is written: one fsync after the other on a thread
// of its own. The writer's last fsync then has little to wait for.

/** A message to the thread: its file, and a word in shared memory with its command. */
export interface WriteBackJob {
	readonly fd: number;
	readonly state: SharedArrayBuffer;
}

export const WriteBackState = { idle: 0, asked: 1, syncing: 2, failed: 3, over: 4 } as const;

/** For both sides: waits while the word is `state`; returns its next value. */
export function waitWhile(word: Int32Array, state: number): number {
	for (;;) {
		const now = Atomics.load(word, 0);
		if (now !== state) return now;
		Atomics.wait(word, 0, now, 1000);
	}
}

export class WriteBack {
	readonly #worker = openWorker("checkpoint/write-back-worker");
	readonly #word: Int32Array;

	constructor(fd: number) {
		const state = new SharedArrayBuffer(4);
		this.#word = new Int32Array(state);
		this.#worker.postMessage({ fd, state } satisfies WriteBackJob);
	}

	/** Asks for an fsync unless one is under way. */
	ask(): void {
		this.#change(WriteBackState.idle, WriteBackState.asked);
	}

	/** Waits for the fsync under way and ends the thread. Whether all have succeeded: a failure is reported only once. */
	end(): boolean {
		// A command that the thread has not begun is left to the caller.
		this.#change(WriteBackState.asked, WriteBackState.over);
		const state = waitWhile(this.#word, WriteBackState.syncing);
		this.#change(state, WriteBackState.over);
		return state !== WriteBackState.failed;
	}

	#change(from: number, to: number): void {
		if (Atomics.compareExchange(this.#word, 0, from, to) === from) Atomics.notify(this.#word, 0);
	}
}
