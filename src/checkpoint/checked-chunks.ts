/**
 * Compares the checksum of a chunk before any of its bytes is given out. A checksum is of the whole chunk, so the first
 * read of any part reads all of it. A chunk of up to KEPT bytes stays in memory, and the checked bytes are given out; a
 * larger one is read again right after, from the system's cache. Each chunk is checked once.
 */

/** The stored bytes of a chunk. */
export interface ChunkBytes {
	readonly size: number;
	readonly readInto: (position: number, into: Uint8Array) => void;
}

/** A checksum in the making; `finish` throws a UserError if it is not the one that was written. */
export interface ChunkSum {
	update(bytes: Uint8Array): void;
	finish(): void;
}

/** Bytes of the chunk that stays in memory. */
const KEPT = 2 ** 26;
/** Pieces of this size stay in a core's cache while they are read and hashed in turn. */
const PIECE = 2 ** 18;

export class CheckedChunks<Chunk extends object> {
	readonly #checked = new WeakSet<Chunk>();
	#kept: { readonly chunk: Chunk; readonly bytes: Uint8Array } | null = null;
	/** Buffer of the kept chunk, reused for the next. */
	#room = new Uint8Array(0);
	readonly #buffer = new Uint8Array(PIECE);

	/** Fills `into` with the chunk's bytes from `position` on; `open` and `sum` are asked for when they are needed. */
	read(chunk: Chunk, position: number, into: Uint8Array, open: () => ChunkBytes, sum: () => ChunkSum): void {
		if (this.#kept?.chunk !== chunk) {
			const bytes = open();
			if (!this.#checked.has(chunk)) {
				if (bytes.size <= KEPT) this.#keep(chunk, bytes, sum());
				else this.check(chunk, bytes, sum());
			}
			if (this.#kept?.chunk !== chunk) {
				bytes.readInto(position, into);
				return;
			}
		}
		into.set(this.#kept.bytes.subarray(position, position + into.byteLength));
	}

	/** Reads a whole chunk and compares its checksum. */
	check(chunk: Chunk, { size, readInto }: ChunkBytes, sum: ChunkSum): void {
		for (let position = 0; position < size; position += PIECE) {
			const piece = this.#buffer.subarray(0, Math.min(PIECE, size - position));
			readInto(position, piece);
			sum.update(piece);
		}
		sum.finish();
		this.#checked.add(chunk);
	}

	/** Marks a chunk as checked, because another rank has checked it. */
	trust(chunk: Chunk): void {
		this.#checked.add(chunk);
	}

	#keep(chunk: Chunk, { size, readInto }: ChunkBytes, sum: ChunkSum): void {
		this.#kept = null;
		if (this.#room.length < size) this.#room = new Uint8Array(Math.min(KEPT, 2 * size));
		const bytes = this.#room.subarray(0, size);
		for (let position = 0; position < size; position += PIECE) {
			const piece = bytes.subarray(position, Math.min(size, position + PIECE));
			readInto(position, piece);
			sum.update(piece);
		}
		sum.finish();
		this.#checked.add(chunk);
		this.#kept = { chunk, bytes };
	}
}
