/** `.tar.idx` and `.jsonl.idx`: unsigned 64-bit little-endian offsets, one per sample and one for the end. */
import { DamagedIndexError } from "../errors.ts";
import type { RandomAccessFile, Storage } from "../storage/storage.ts";

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
