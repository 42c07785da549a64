/** JSONL datasets: a file with a JSON object on each line, and an index of line offsets beside it (docs/spec/energon.md §1.5). */
import { shownAddress } from "../../../system/addresses.ts";
import { UserError } from "../../../system/errors.ts";
import { DamagedIndexError, FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { nameOf, type RandomAccessFile, type Storage } from "../storage/storage.ts";
import type { SampleReader } from "../wrappers/sample-loader.ts";
import { mediaOfRecord } from "./media.ts";
import { jsonlIndexName } from "./names.ts";
import { parseJsonBytes } from "./python-text.ts";

/** Records of a JSONL file by index; each has the single part "json". */
export class JsonlReader implements SampleReader {
	readonly length: number;
	readonly #index: OffsetIndex;
	readonly #file: RandomAccessFile;

	/** Throws a UserError if the index is missing or belongs to another version of the file. */
	constructor(
		storage: Storage,
		readonly path: string,
	) {
		const indexPath = jsonlIndexName(path);
		if (!storage.isFile(indexPath)) {
			const media = firstMedia(storage, path);
			if (media !== null) throw new UserError(`${path}, record 0: ${media}.`);
			throw new UserError(`${path} has no index: run \`mimo data prepare ${path}\` first.`);
		}
		this.#index = OffsetIndex.open(storage, indexPath);
		this.#file = storage.open(path);
		this.length = this.#index.length - 1;
		if (this.length < 0 || this.#index.at(this.length) !== this.#file.size) {
			throw new UserError(
				`${this.#index.path} is the index of another version of ${path}: run \`mimo data prepare ${path}\`.`,
			);
		}
	}

	read(index: number): RawSample {
		if (index < 0 || index >= this.length) {
			throw new FatalSampleError(`There is no record ${index} in ${this.path}; it has ${this.length}.`);
		}
		const start = this.#index.at(index);
		const end = this.#index.at(index + 1);
		if (end < start) throw new FatalSampleError(`${this.#index.path}: entry ${index + 1} is below entry ${index}.`);
		const key = String(index);
		const shard = nameOf(this.path);
		return {
			key,
			shard,
			sources: [{ datasetPath: shownAddress(this.path), index, shardName: shard, fileNames: [`${key}.json`] }],
			parts: new Map([["json", this.#file.read(start, end - start)]]),
		};
	}
}

/** Bytes in which the first record has to end to be checked. */
const FIRST_BYTES = 2 ** 20;

/** Why training cannot use the first record of a JSONL file; null where it can, or where the record cannot be read. */
function firstMedia(storage: Storage, path: string): string | null {
	const file = storage.open(path);
	try {
		const bytes = file.read(0, FIRST_BYTES);
		const newline = bytes.indexOf(0x0a);
		return mediaOfRecord(parseJsonBytes(newline < 0 ? bytes : bytes.subarray(0, newline)), path);
	} catch {
		return null;
	} finally {
		file.close();
	}
}

/**
 * Offsets of the records of a JSONL file, and its size. Blank lines belong to the record before them, leading blank lines to
 * the first record. Throws a UserError for a line that is not one JSON object.
 */
export function indexJsonl(bytes: Uint8Array, path: string): number[] {
	if (bytes.length === 0) throw new UserError(`${path} is empty.`);
	const offsets: number[] = [];
	let line = 0;
	for (let start = 0; start < bytes.length; ) {
		const newline = bytes.indexOf(0x0a, start);
		const end = newline < 0 ? bytes.length : newline + 1;
		line++;
		const [first, last] = trim(bytes, start, end);
		if (first < last) {
			if (bytes[first] !== 0x7b || bytes[last - 1] !== 0x7d) {
				throw new UserError(`${path}, line ${line} does not start with "{" and end with "}".`);
			}
			offsets.push(offsets.length === 0 ? 0 : start);
		}
		start = end;
	}
	if (offsets.length === 0) throw new UserError(`${path} has no records.`);
	return [...offsets, bytes.length];
}

function trim(bytes: Uint8Array, start: number, end: number): [number, number] {
	const blank = (byte: number | undefined) => byte === 0x20 || (byte !== undefined && byte >= 0x09 && byte <= 0x0d);
	let first = start;
	let last = end;
	while (first < last && blank(bytes[first])) first++;
	while (last > first && blank(bytes[last - 1])) last--;
	return [first, last];
}

// `.tar.idx` and `.jsonl.idx`: unsigned 64-bit little-endian offsets, one per sample and one for the end.

/** Entries that are read at once. */
const BLOCK_ENTRIES = 8192;

export class OffsetIndex {
	readonly #file: RandomAccessFile;
	#block: DataView | null = null;
	#blockStart = 0;

	private constructor(file: RandomAccessFile) {
		this.#file = file;
	}

	static open(storage: Storage, path: string): OffsetIndex {
		return new OffsetIndex(storage.open(path));
	}

	/** Number of entries, without trailing bytes. */
	get length(): number {
		return Math.floor(this.#file.size / 8);
	}

	/** Bytes after the last whole entry, which are not read. */
	get trailingBytes(): number {
		return this.#file.size % 8;
	}

	get path(): string {
		return this.#file.path;
	}

	/** Entry `i`. Throws a DamagedIndexError if the index lacks the entry or the entry cannot be an offset. */
	at(i: number): number {
		if (i < 0 || i >= this.length) {
			throw new DamagedIndexError(`${this.#file.path} has ${this.length} entries; entry ${i} is needed.`);
		}
		if (this.#block === null || i < this.#blockStart || i >= this.#blockStart + this.#block.byteLength / 8) {
			this.#blockStart = i - (i % BLOCK_ENTRIES);
			const bytes = this.#file.read(8 * this.#blockStart, 8 * Math.min(BLOCK_ENTRIES, this.length - this.#blockStart));
			this.#block = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
		}
		const at = 8 * (i - this.#blockStart);
		if (at + 8 > this.#block.byteLength)
			throw new DamagedIndexError(`${this.#file.path} could not be read to its end.`);
		const high = this.#block.getUint32(at + 4, true);
		if (high >= 1 << 21) throw new DamagedIndexError(`${this.#file.path}: entry ${i} is not an offset.`);
		return high * 4294967296 + this.#block.getUint32(at, true);
	}

	close(): void {
		this.#block = null;
		this.#file.close();
	}

	/** The bytes of an index with these entries. */
	static encode(entries: readonly number[]): Uint8Array {
		const bytes = new Uint8Array(8 * entries.length);
		const view = new DataView(bytes.buffer);
		for (const [i, entry] of entries.entries()) view.setBigUint64(8 * i, BigInt(entry), true);
		return bytes;
	}
}
