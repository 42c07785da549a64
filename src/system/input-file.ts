/**
 * Files that others may have made: only a regular file is opened, read to a bound, and, where it belongs to a folder, without
 * following a link out of that folder. A pipe, socket or device in a file's place is refused, not waited for. Every failure is
 * one sentence that names the file.
 */
import { closeSync, constants, fstatSync, openSync, readSync, realpathSync } from "node:fs";
import { join, sep } from "node:path";
import { UserError } from "./errors.ts";
import { watched } from "./read-watch.ts";
import { fileError } from "./system-errors.ts";

/** Largest read of one system call, which returns soon from a disk that answers. */
const LARGEST_READ = 2 ** 26;

/** Bytes that are read by position. Reading outside is an error that names the path. */
export interface ByteSource {
	readonly path: string;
	readonly size: number;
	read(position: number, length: number): Uint8Array;
	readInto(position: number, into: Uint8Array): void;
}

export interface OpenOptions {
	/**
	 * The folder that the file belongs to, which a link may not leave, but from a snapshot of Hugging Face's download cache to the
	 * blobs of its repository. Absent: links are followed, because the path itself was chosen by the user.
	 */
	readonly inside?: string | undefined;
	/** False refuses a symbolic link at the end of the path, wherever it leads. Default: true. */
	readonly followLinks?: boolean;
	/** The file's name in the sentence that it cannot be opened, such as "the tokenizer a.json". Default: its path. */
	readonly called?: string;
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

	static open(path: string, { inside, followLinks = true, called = path }: OpenOptions = {}): InputFile {
		let fd: number;
		try {
			if (inside !== undefined) requireInside(path, inside, called);
			// O_NONBLOCK: opening a pipe must not wait for its writer.
			const links = followLinks ? 0 : constants.O_NOFOLLOW;
			fd = watched(path, () => openSync(path, constants.O_RDONLY | constants.O_NONBLOCK | links));
		} catch (error) {
			if (error instanceof UserError) throw error;
			throw fileError("open", called, error);
		}
		const status = fstatSync(fd);
		if (!status.isFile()) {
			closeSync(fd);
			throw new UserError(`Cannot open ${called}: it is ${status.isDirectory() ? "a folder" : "not a regular file"}.`);
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

/** Throws a UserError for a path whose file lies neither in the folder nor in the blobs that the folder is a snapshot of. */
function requireInside(path: string, folder: string, called: string): void {
	const real = realpathSync(path);
	const root = realpathSync(folder);
	if ([root, ...blobsOf(root)].some((home) => real.startsWith(join(home, sep)))) return;
	throw new UserError(`Cannot open ${called}: it is a link that leads out of its folder, to ${real}.`);
}

/**
 * The blobs of the download cache's repository in whose snapshot a folder lies: REPOSITORY/snapshots/REVISION/… is made of links
 * to REPOSITORY/blobs/…. Empty for any other folder, and for blobs that are a link themselves.
 */
function blobsOf(root: string): string[] {
	const at = root.lastIndexOf(`${sep}snapshots${sep}`);
	if (at < 0) return [];
	const blobs = join(root.slice(0, at), "blobs");
	try {
		return realpathSync(blobs) === blobs ? [blobs] : [];
	} catch {
		return [];
	}
}

/** The whole of a file; one of more than `limit` bytes is refused unread. */
export function readWholeFile(path: string, limit: number, options: OpenOptions = {}): Uint8Array {
	using file = InputFile.open(path, options);
	if (file.size > limit) {
		throw new UserError(`${path} has ${file.size} bytes, more than the ${limit} that are read of such a file.`);
	}
	return file.read(0, file.size);
}

/** The whole of a file of at most `limit` bytes as UTF-8. */
export function readWholeText(path: string, limit: number, options: OpenOptions = {}): string {
	return Buffer.from(readWholeFile(path, limit, options).buffer).toString("utf8");
}

/** Bytes that are read of a file at once. */
const CHUNK = 2 ** 20;

export interface Line {
	/** Its number in the file, from 1 on. */
	readonly number: number;
	/** Its bytes without the line end, valid until the next line is asked for. */
	readonly bytes: Buffer;
}

export interface LineOptions {
	/** Bytes of the longest line; a longer one throws a UserError that names it. */
	readonly limit: number;
	/** Whether a last line without a line end counts; it is incomplete in a file that is still written. */
	readonly unended: boolean;
}

/** The lines of a file, as long as it is when it is opened, in memory for the longest line. */
export function* linesOf(path: string, { limit, unended }: LineOptions): Generator<Line> {
	using file = InputFile.open(path);
	// The bytes that are read and not yet part of a line: buffer[begin, end).
	let buffer = Buffer.alloc(Math.min(2 * CHUNK, file.size));
	let [begin, end] = [0, 0];
	let number = 1;
	for (let at = 0; at < file.size; ) {
		const length = Math.min(CHUNK, file.size - at);
		if (end + length > buffer.length) {
			const wider = end - begin + length > buffer.length ? Buffer.alloc(2 * buffer.length) : buffer;
			buffer.copy(wider, 0, begin, end);
			[buffer, begin, end] = [wider, 0, end - begin];
		}
		file.readInto(at, buffer.subarray(end, end + length));
		at += length;
		let searched = end;
		end += length;
		for (;;) {
			const found = buffer.subarray(0, end).indexOf(10, searched);
			if ((found < 0 ? end : found) - begin > limit) {
				throw new UserError(`${path}, line ${number} has more than ${limit} bytes.`);
			}
			if (found < 0) break;
			yield { number: number++, bytes: buffer.subarray(begin, found) };
			begin = found + 1;
			searched = begin;
		}
	}
	if (unended && end > begin) yield { number, bytes: buffer.subarray(begin, end) };
}
