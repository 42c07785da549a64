/**
 * Dense tensors stored as boxes (chunks): coverage checks, and reads of any range of the whole tensor's bytes. Both
 * torch_dist and the native format store tensors so; chunks may be uneven and in any order
 * (docs/spec/checkpoint.md §1.2, §1.9).
 */

/** A box of a tensor: where it begins and how far it reaches on every axis. */
export interface Box {
	readonly offsets: readonly number[];
	readonly sizes: readonly number[];
}

/**
 * Checks that the boxes partition `shape`: all inside, none overlapping, volumes adding up. Returns null, or the fault as the end
 * of a sentence "tensor w …".
 */
export function partitionFault(shape: readonly number[], boxes: readonly Box[]): string | null {
	const volume = (sizes: readonly number[]) => sizes.reduce((product, size) => product * size, 1);
	let covered = 0;
	for (const { offsets, sizes } of boxes) {
		if (offsets.length !== shape.length || sizes.length !== shape.length) return "has a chunk of another rank";
		if (sizes.some((size, axis) => offsets[axis]! + size > shape[axis]!)) {
			return `has a chunk at [${offsets}] of size [${sizes}] that reaches past its shape [${shape}]`;
		}
		covered += volume(sizes);
	}
	const filled = boxes.filter(({ sizes }) => !sizes.includes(0));
	const overlap = overlapOf(shape, filled);
	if (overlap) return `has overlapping chunks at [${overlap[0].offsets}] and [${overlap[1].offsets}]`;
	if (covered !== volume(shape)) return `of shape [${shape}] has chunks for ${covered} of ${volume(shape)} elements`;
	return null;
}

/** Sweeps along the axis with the most distinct starts; only boxes that share a position there are compared. */
function overlapOf(shape: readonly number[], boxes: readonly Box[]): [Box, Box] | null {
	if (boxes.length < 2) return null;
	if (shape.length === 0) return [boxes[0]!, boxes[1]!];
	const distinct = shape.map((_, axis) => new Set(boxes.map(({ offsets }) => offsets[axis])).size);
	const axis = distinct.indexOf(Math.max(...distinct));
	const sorted = [...boxes].sort((a, b) => a.offsets[axis]! - b.offsets[axis]!);
	let active: Box[] = [];
	for (const box of sorted) {
		active = active.filter((other) => other.offsets[axis]! + other.sizes[axis]! > box.offsets[axis]!);
		for (const other of active) {
			const apart = shape.some(
				(_, a) =>
					other.offsets[a]! + other.sizes[a]! <= box.offsets[a]! ||
					box.offsets[a]! + box.sizes[a]! <= other.offsets[a]!,
			);
			if (!apart) return [other, box];
		}
		active.push(box);
	}
	return null;
}

/** A run shorter than this is read together with its neighbours. */
const SHORT_RUN = 2 ** 15;
const LARGEST_SPAN = 2 ** 23;

/**
 * Fills the part of `into`, which stands for bytes [offset, offset + into.length) of the whole tensor, that a box holds.
 * `read` fills a buffer with the box's own bytes from a position on; positions asked for ascend.
 */
export function readBox(
	shape: readonly number[],
	elementBytes: number,
	box: Box,
	offset: number,
	into: Uint8Array,
	read: (position: number, into: Uint8Array) => void,
): void {
	if (box.sizes.includes(0)) return;
	const end = offset + into.byteLength;
	// Axes after `cut` are whole, so one run holds everything from the cut axis on.
	let cut = shape.length - 1;
	while (cut > 0 && box.sizes[cut] === shape[cut]) cut--;
	const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((n, size) => n * size, elementBytes));
	const boxStrides = shape.map((_, axis) => box.sizes.slice(axis + 1).reduce((n, size) => n * size, elementBytes));
	const runBytes = shape.length === 0 ? elementBytes : box.sizes[cut]! * strides[cut]!;
	const batch = new Batch(read, into, runBytes < SHORT_RUN);
	const visit = (axis: number, whole: number, local: number): void => {
		if (axis >= cut) {
			const begin = whole + (shape.length === 0 ? 0 : box.offsets[cut]! * strides[cut]!);
			const from = Math.max(offset, begin);
			const to = Math.min(end, begin + runBytes);
			if (to > from) batch.add(local + from - begin, from - offset, to - from);
			return;
		}
		const [stride, start] = [strides[axis]!, whole + box.offsets[axis]! * strides[axis]!];
		const first = Math.max(0, Math.floor((offset - start) / stride));
		const last = Math.min(box.sizes[axis]!, Math.ceil((end - start) / stride));
		for (let i = first; i < last; i++) visit(axis + 1, start + i * stride, local + i * boxStrides[axis]!);
	};
	visit(0, 0, 0);
	batch.flush();
}

/** Joins reads of short neighbouring runs. */
class Batch {
	#runs: { local: number; target: number; bytes: number }[] = [];

	constructor(
		readonly read: (position: number, into: Uint8Array) => void,
		readonly into: Uint8Array,
		readonly join: boolean,
	) {}

	add(local: number, target: number, bytes: number): void {
		if (!this.join) {
			this.read(local, this.into.subarray(target, target + bytes));
			return;
		}
		const first = this.#runs[0];
		if (first && local + bytes - first.local > LARGEST_SPAN) this.flush();
		this.#runs.push({ local, target, bytes });
	}

	flush(): void {
		const first = this.#runs[0];
		const last = this.#runs.at(-1);
		if (!first || !last) return;
		const span = new Uint8Array(last.local + last.bytes - first.local);
		this.read(first.local, span);
		for (const { local, target, bytes } of this.#runs) {
			this.into.set(span.subarray(local - first.local, local - first.local + bytes), target);
		}
		this.#runs = [];
	}
}

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

/**
 * Compares the checksum of a chunk before any of its bytes is given out. A checksum is of the whole chunk, so the first read
 * of any part reads all of it. A chunk of up to KEPT bytes stays in memory, and the checked bytes are given out; a larger
 * one is read again right after, from the system's cache. Each chunk is checked once.
 */
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

	/** Reads a whole chunk and compares its checksum. `whole`: room for all of its bytes; null: they are not kept. */
	check(chunk: Chunk, { size, readInto }: ChunkBytes, sum: ChunkSum, whole: Uint8Array | null = null): void {
		for (let position = 0; position < size; position += PIECE) {
			const bytes = Math.min(PIECE, size - position);
			const piece = whole?.subarray(position, position + bytes) ?? this.#buffer.subarray(0, bytes);
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

	#keep(chunk: Chunk, stored: ChunkBytes, sum: ChunkSum): void {
		this.#kept = null;
		if (this.#room.length < stored.size) this.#room = new Uint8Array(Math.min(KEPT, 2 * stored.size));
		const bytes = this.#room.subarray(0, stored.size);
		this.check(chunk, stored, sum, bytes);
		this.#kept = { chunk, bytes };
	}
}
