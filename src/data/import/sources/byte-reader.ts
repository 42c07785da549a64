/** A file from front to back, a chunk at a time. */
import { InputFile } from "../../../checkpoint/files.ts";

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

	/** The chunk that begins with byte `at`, which is not before the last one asked for; empty at the end. */
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

/** Bytes of a record that are kept; what goes on longer is passed over. */
export const LARGEST_RECORD = 2 ** 26;

/** Gathers the bytes of a record over chunks. */
export class RecordBytes {
	#pieces: Uint8Array[] = [];
	#length = 0;

	/** Whether the record is longer than any that is read. */
	get tooLong(): boolean {
		return this.#length > LARGEST_RECORD;
	}

	add(piece: Uint8Array): void {
		this.#length += piece.length;
		if (this.tooLong) this.#pieces = [];
		else this.#pieces.push(piece);
	}

	/** Takes the gathered bytes; the next record begins empty. */
	take(): Uint8Array {
		const bytes = this.#pieces.length === 1 ? this.#pieces[0]! : Buffer.concat(this.#pieces);
		this.#pieces = [];
		this.#length = 0;
		return bytes;
	}
}
