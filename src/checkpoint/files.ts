/**
 * Files that are read by position and files that are either whole or not there: temporary name, fsync, rename, fsync of
 * the folder (docs/spec/checkpoint.md §7). Every failure is one sentence that names the file.
 */
import { closeSync, constants, fstatSync, fsyncSync, openSync, readSync, renameSync, rmSync, writeSync } from "node:fs";
import { dirname } from "node:path";
import { reserve } from "../native/reserve.ts";
import { UserError } from "../system/errors.ts";
import { watched } from "../system/read-watch.ts";
import { fileError } from "../system/system-errors.ts";
import { WriteBack } from "./write-back.ts";

/** Largest write of one system call; the kernel cuts larger ones at 2 GiB. */
const LARGEST_TRANSFER = 2 ** 30;

/** Largest read of one system call, which returns soon from a disk that answers. */
const LARGEST_READ = 2 ** 26;

/** Bytes that are read by position. Reading outside is an error that names the path. */
export interface ByteSource {
	readonly path: string;
	readonly size: number;
	read(position: number, length: number): Uint8Array;
	readInto(position: number, into: Uint8Array): void;
}

/** A regular file, read by position. The caller of open() disposes it. */
export class InputFile implements ByteSource, Disposable {
	#fd: number | null;

	private constructor(
		readonly path: string,
		fd: number,
		/** Bytes, when it was opened. */
		readonly size: number,
	) {
		this.#fd = fd;
	}

	/** Opens a regular file (a folder, pipe or device is refused); `followLinks: false` refuses a symbolic link. */
	static open(path: string, options: { followLinks?: boolean } = {}): InputFile {
		let fd: number;
		try {
			const links = options.followLinks === false ? constants.O_NOFOLLOW : 0;
			fd = watched(path, () => openSync(path, constants.O_RDONLY | constants.O_NONBLOCK | links));
		} catch (error) {
			throw fileError("open", path, error);
		}
		const status = fstatSync(fd);
		if (!status.isFile()) {
			closeSync(fd);
			throw new UserError(`Cannot open ${path}: it is not a regular file.`);
		}
		return new InputFile(path, fd, status.size);
	}

	/** Fills `into` from `position` on; a file that ends before is an error. */
	readInto(position: number, into: Uint8Array): void {
		if (this.#fd === null) throw new Error(`${this.path} is closed.`);
		if (position < 0 || position + into.byteLength > this.size) {
			throw new UserError(
				`${this.path} is truncated: ${into.byteLength} bytes at ${position} were asked of ${this.size}.`,
			);
		}
		for (let done = 0; done < into.byteLength; ) {
			let count: number;
			try {
				const length = Math.min(into.byteLength - done, LARGEST_READ);
				const fd = this.#fd;
				count = watched(this.path, () => readSync(fd, into, done, length, position + done));
			} catch (error) {
				throw fileError("read", this.path, error);
			}
			if (count === 0) throw new UserError(`${this.path} became shorter while it was read.`);
			done += count;
		}
	}

	/** `length` bytes from `position` on, in memory of their own. Nothing is allocated for a range outside the file. */
	read(position: number, length: number): Uint8Array {
		if (!Number.isSafeInteger(length) || length < 0 || position < 0 || position + length > this.size) {
			throw new UserError(`${this.path} is truncated: ${length} bytes at ${position} were asked of ${this.size}.`);
		}
		const bytes = new Uint8Array(length);
		this.readInto(position, bytes);
		return bytes;
	}

	[Symbol.dispose](): void {
		if (this.#fd !== null) closeSync(this.#fd);
		this.#fd = null;
	}
}

/**
 * The whole of a regular file; one of more than `limit` bytes is refused unread. Everything that reads a checkpoint goes
 * through this or InputFile.open: a pipe, socket or device in a file's place is refused, not waited for.
 */
export function readWholeFile(path: string, limit: number, options: { followLinks?: boolean } = {}): Uint8Array {
	using file = InputFile.open(path, options);
	if (file.size > limit) {
		throw new UserError(`${path} has ${file.size} bytes, more than the ${limit} that are read of such a file.`);
	}
	return file.read(0, file.size);
}

/** Open files at once; systems allow some thousand a process. */
const LARGEST_POOL = 64;

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

/** A new file, written from front to back. Must be closed (durably, unless `sync` is false) or disposed. */
export class OutputFile implements Disposable {
	#fd: number | null;
	#position = 0;
	/** Background write-back of a large file; null for a small one. */
	#writeBack: WriteBack | null = null;
	#asked = 0;

	readonly #sync: boolean;

	/** Creates `path`, which must not exist. */
	constructor(
		readonly path: string,
		{ sync = true }: Durability = {},
	) {
		this.#sync = sync;
		try {
			this.#fd = openSync(path, "wx+");
		} catch (error) {
			throw fileError("create", path, error);
		}
	}

	/** Bytes written so far. */
	get position(): number {
		return this.#position;
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
				done += writeSync(this.#fd, bytes, done, Math.min(bytes.byteLength - done, LARGEST_TRANSFER));
			} catch (error) {
				throw fileError("write", this.path, error);
			}
		}
		this.#position += bytes.byteLength;
		if (this.#sync && this.#position - this.#asked >= WRITE_BACK) {
			this.#asked = this.#position;
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
