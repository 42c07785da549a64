/** Reads a file from front to back, a chunk at a time. */
import { InputFile } from "../../../system/input-file.ts";

const CHUNK = 2 ** 20;

export class ByteReader implements Disposable {
	readonly #file: InputFile;
	#chunk: Uint8Array = new Uint8Array(0);
	#start: number;

	constructor(
		readonly path: string,
		from = 0,
	) {
		this.#file = InputFile.open(path);
		this.#start = from;
	}

	get size(): number {
		return this.#file.size;
	}

	/** The chunk from byte `at` on, which may not be before the previous chunk; empty at the end of the file. */
	chunk(at: number): Uint8Array {
		if (at < this.#start || at >= this.#start + this.#chunk.length) {
			this.#start = at;
			this.#chunk = this.#file.read(at, Math.max(0, Math.min(CHUNK, this.size - at)));
		}
		return this.#chunk.subarray(at - this.#start);
	}

	[Symbol.dispose](): void {
		this.#file[Symbol.dispose]();
	}
}

/** Bytes of the longest record; longer records are skipped. */
export const LARGEST_RECORD = 2 ** 26;

/** Collects the bytes of a record from several chunks. */
export class RecordBytes {
	#pieces: Uint8Array[] = [];
	#length = 0;

	/** Whether the record is too long. */
	get tooLong(): boolean {
		return this.#length > LARGEST_RECORD;
	}

	add(piece: Uint8Array): void {
		this.#length += piece.length;
		if (this.tooLong) this.#pieces = [];
		else this.#pieces.push(piece);
	}

	/** Returns the collected bytes and begins the next record. */
	take(): Uint8Array {
		const bytes = this.#pieces.length === 1 ? this.#pieces[0]! : Buffer.concat(this.#pieces);
		this.#pieces = [];
		this.#length = 0;
		return bytes;
	}
}
