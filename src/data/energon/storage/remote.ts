/**
 * Files on HTTP(S) servers and S3-compatible stores, read in blocks through a cache on the local disk. A thread fetches the
 * blocks, some of them ahead of the reader.
 */
import { UserError } from "../../../system/errors.ts";
import { watched } from "../../../system/read-watch.ts";
import { openWorker } from "../../../system/worker.ts";
import { DataTimeoutError } from "../errors.ts";
import { blockPath, type CacheFolder, openCacheFolder, readBlock } from "./block-cache.ts";
import { type RandomAccessFile, type RemoteOptions, type RemoteVersion, type Storage, textOf } from "./storage.ts";

/** Number of blocks of a file in memory. */
const KEPT = 3;

export class RemoteStorage implements Storage {
	#fetching: { readonly thread: Worker; readonly folder: CacheFolder } | null = null;
	/** Known versions by URL; null: the file does not exist. */
	readonly #versions = new Map<string, RemoteVersion | null>();

	constructor(private readonly options: RemoteOptions) {}

	open(path: string): RandomAccessFile {
		const version = this.#version(path);
		if (version === null) throw new UserError(`${path} does not exist.`);
		const { folder } = this.#fetcher();
		return new RemoteFile(version, this.options, folder, (request) => this.#post(request));
	}

	readText(path: string): string {
		return textOf(this.open(path));
	}

	isFile(path: string): boolean {
		return this.#version(path) !== null;
	}

	/** Servers have no folders; a URL counts as a folder if a prepared data set is below it. */
	isFolder(path: string): boolean {
		return this.isFile(`${path}/.nv-meta/.info.json`);
	}

	#version(url: string): RemoteVersion | null {
		const known = this.#versions.get(url);
		if (known !== undefined) return known;
		const answer = newAnswer();
		this.#post({ kind: "stat", url, answer });
		const { state, text, number } = taken(answer, url, this.options);
		const etag = text === "" ? null : text;
		const cacheName = etag ?? crypto.randomUUID();
		const version = state === Answer.missing ? null : { url, size: number, etag, cacheName };
		this.#versions.set(url, version);
		return version;
	}

	/** The fetching thread, and the folder of its blocks. */
	#fetcher(): { readonly thread: Worker; readonly folder: CacheFolder } {
		if (this.#fetching === null) {
			const folder = openCacheFolder(this.options.cacheFolder);
			const thread = openWorker("data/energon/storage/fetcher");
			thread.unref();
			thread.postMessage({ kind: "options", options: this.options, folder } satisfies FetchRequest);
			this.#fetching = { thread, folder };
		}
		return this.#fetching;
	}

	#post(request: FetchRequest): void {
		this.#fetcher().thread.postMessage(request);
	}
}

/** Milliseconds by which the fetching thread may be later than the time limit of a read, which it watches itself. */
const graceMilliseconds = 2000;

/** Waits for an answer about a file. Throws a UserError for a failure, a DataTimeoutError when it is late. */
function taken(answer: SharedArrayBuffer, url: string, { timeoutMilliseconds, cacheFolder }: RemoteOptions) {
	const found = take(answer, timeoutMilliseconds + graceMilliseconds);
	if (found.state === Answer.failed) throw new UserError(found.text);
	if (found.state !== Answer.late && found.state !== Answer.pending) return found;
	const nothing = `${url}: no answer came, neither of the server nor of the disk of ${cacheFolder}.`;
	const sentence = found.state === Answer.late ? found.text : nothing;
	throw new DataTimeoutError(`data-timeout ${timeoutMilliseconds / 1000}: ${sentence}`);
}

class RemoteFile implements RandomAccessFile {
	/** The latest blocks, the newest last. */
	readonly #kept = new Map<number, Uint8Array>();
	/** Blocks before this number have been requested ahead. */
	#asked = 0;

	constructor(
		private readonly version: RemoteVersion,
		private readonly options: RemoteOptions,
		private readonly folder: CacheFolder,
		private readonly post: (request: FetchRequest) => void,
	) {}

	get path(): string {
		return this.version.url;
	}

	get size(): number {
		return this.version.size;
	}

	read(offset: number, length: number): Uint8Array {
		const { blockBytes } = this.options;
		const end = Math.min(offset + length, this.size);
		if (offset >= end) return new Uint8Array(0);
		const first = Math.floor(offset / blockBytes);
		const last = Math.floor((end - 1) / blockBytes);
		if (first === last) return this.#block(first).subarray(offset - first * blockBytes, end - first * blockBytes);
		const bytes = new Uint8Array(end - offset);
		for (let block = first; block <= last; block++) {
			const begin = block * blockBytes;
			const content = this.#block(block);
			const from = Math.max(0, offset - begin);
			bytes.set(content.subarray(from, Math.min(content.length, end - begin)), begin + from - offset);
		}
		return bytes;
	}

	close(): void {
		this.#kept.clear();
	}

	#block(block: number): Uint8Array {
		const kept = this.#kept.get(block);
		if (kept !== undefined) return kept;
		const content = this.#fetched(block);
		this.#kept.set(block, content);
		for (const oldest of this.#kept.keys()) {
			if (this.#kept.size <= KEPT) break;
			this.#kept.delete(oldest);
		}
		return content;
	}

	#fetched(block: number): Uint8Array {
		const { blockBytes } = this.options;
		const path = blockPath(this.folder, this.version, block);
		const length = Math.min(blockBytes, this.size - block * blockBytes);
		const cached = watched(path, () => readBlock(this.folder, path, length));
		this.#askAhead(block);
		if (cached !== null) return cached;
		// Another process may remove a block between its writing and its reading.
		for (let attempt = 0; attempt < 3; attempt++) {
			const answer = newAnswer();
			this.post({ kind: "block", version: this.version, block, answer });
			const { state, text } = taken(answer, this.path, this.options);
			if (state !== Answer.done) throw new UserError(text);
			const content = watched(path, () => readBlock(this.folder, path, length));
			if (content !== null) return content;
		}
		throw new UserError(`The cache folder ${this.folder.path} does not keep blocks: is the disk full?`);
	}

	#askAhead(block: number): void {
		const blocks = Math.ceil(this.size / this.options.blockBytes);
		const until = Math.min(blocks, block + 1 + this.options.readAhead);
		for (let ahead = Math.max(block + 1, this.#asked); ahead < until; ahead++) {
			this.post({ kind: "block", version: this.version, block: ahead, answer: null });
			this.#asked = ahead + 1;
		}
	}
}

// Messages between a data thread and its fetching thread. Reading is synchronous: the data thread waits on shared
// memory for the answer.

export type FetchRequest =
	| { readonly kind: "options"; readonly options: RemoteOptions; readonly folder: CacheFolder }
	| { readonly kind: "stat"; readonly url: string; readonly answer: SharedArrayBuffer }
	/** Requests a block in the cache. `answer` null: no thread waits for it yet. */
	| {
			readonly kind: "block";
			readonly version: RemoteVersion;
			readonly block: number;
			readonly answer: SharedArrayBuffer | null;
	  };

export const Answer = { pending: 0, done: 1, missing: 2, failed: 3, late: 4 } as const;
type AnswerState = (typeof Answer)[keyof typeof Answer];

/** Offset of the text in an answer, behind the state, the length of the text, and a number. */
const TEXT = 16;
const BYTES = 4096;

function newAnswer(): SharedArrayBuffer {
	return new SharedArrayBuffer(BYTES);
}

/** Fills an answer and wakes the thread that waits for it. */
export function give(answer: SharedArrayBuffer, state: AnswerState, text: string, number = 0): void {
	const bytes = new TextEncoder().encode(text).subarray(0, BYTES - TEXT);
	new Uint8Array(answer).set(bytes, TEXT);
	new Float64Array(answer)[1] = number;
	const words = new Int32Array(answer);
	words[1] = bytes.length;
	Atomics.store(words, 0, state);
	Atomics.notify(words, 0);
}

/** Waits for an answer, at most for `milliseconds`: then it is still pending. */
function take(
	answer: SharedArrayBuffer,
	milliseconds: number,
): {
	readonly state: AnswerState;
	readonly text: string;
	number: number;
} {
	const words = new Int32Array(answer);
	const end = performance.now() + milliseconds;
	while (Atomics.load(words, 0) === Answer.pending && performance.now() < end) {
		Atomics.wait(words, 0, Answer.pending, Math.min(1000, milliseconds));
	}
	const text = new TextDecoder().decode(Uint8Array.from(new Uint8Array(answer, TEXT, words[1])));
	return { state: Atomics.load(words, 0) as AnswerState, text, number: new Float64Array(answer)[1]! };
}
