/** A copy of this rank's tensors, in host memory that another thread reads while training changes the originals. */
import { dtypeBytes, type Tensor } from "../../tensor/index.ts";
import type { DtypeTag } from "../dtype.ts";
import type { SnapshotEntry } from "../native/save-thread.ts";
import {
	arrangedPieces,
	type Move,
	optimizerName,
	type Piece,
	type StoredBuffer,
	type TrainingTensors,
} from "./tensors.ts";

const tags = { f32: "F32", bf16: "BF16" } as const satisfies Record<string, DtypeTag>;

/** Elements of a buffer that are copied at once: an array of JavaScript's ends at 4 GiB. */
const largestCopy = 2 ** 28;

/** Host memory that one snapshot after the other uses: allocated at the first. */
export class SnapshotMemory {
	readonly #blocks: SharedArrayBuffer[] = [];
	#used = 0;

	/** `elements`: the most that are copied at once. */
	constructor(readonly elements = largestCopy) {}

	/** Everything given out before is free again. */
	reset(): void {
		this.#used = 0;
	}

	/** A block of at least `bytes`. */
	take(bytes: number): SharedArrayBuffer {
		const at = this.#used++;
		const known = this.#blocks[at];
		if (known && known.byteLength >= bytes) return known;
		this.#blocks[at] = new SharedArrayBuffer(bytes);
		return this.#blocks[at];
	}
}

/** Copies this rank's share; the entries are valid until `memory` is reset. */
export function takeSnapshot(
	tensors: TrainingTensors,
	memory: SnapshotMemory,
	withOptimizer: boolean,
): SnapshotEntry[] {
	memory.reset();
	const entries: SnapshotEntry[] = [];
	for (const stored of tensors.buffers) {
		const { begin, end } = stored;
		for (let at = begin; at < end; at += memory.elements) {
			const range = { begin: at, end: Math.min(end, at + memory.elements) };
			entries.push(...snapshotOf(stored, range, memory, withOptimizer));
		}
	}
	if (!tensors.writesLoose) return entries;
	for (const { name, shape, value } of tensors.loose) {
		const sizes = [...shape];
		const offsets = shape.map(() => 0);
		entries.push({ name, dtype: "F32", shape, offsets, sizes, memory: copyOf(value, memory), byteOffset: 0 });
	}
	return entries;
}

/** Elements of a flat buffer. */
interface ElementRange {
	readonly begin: number;
	readonly end: number;
}

function snapshotOf(
	{ buffer, shard, parts }: StoredBuffer,
	range: ElementRange,
	memory: SnapshotMemory,
	withOptimizer: boolean,
): SnapshotEntry[] {
	const arranged = parts.map((part) => arrangedPieces(part, range.begin, range.end));
	const pieces = arranged.flatMap((part) => part.pieces);
	const copyRange = (flat: Tensor, first: number, dtype = flat.dtype) => {
		using part = flat.columns(range.begin - first, range.end - range.begin);
		const copy = dtype === flat.dtype ? copyOf(part, memory) : widenedCopyOf(part, memory);
		for (const { moves } of arranged) move(copy, moves, range.begin, dtypeBytes[dtype]);
		return copy;
	};
	const values = copyRange(buffer.values, 0);
	const entriesIn = (copy: CopiedRange) => entriesOf(pieces, range.begin, copy);
	const entries = entriesIn({ dtype: tags[buffer.dtype], memory: values, nameOf: (name) => name });
	if (shard === null || !withOptimizer) return entries;
	// Weights in fp32 are their own masters.
	const master = buffer.dtype === "f32" ? values : copyRange(shard.master, shard.begin);
	const states = [
		["param", master] as const,
		// Moments are fp32 in every checkpoint, whatever a run stores them in (docs/spec/checkpoint.md §3.6).
		...[...shard.states].map(([name, state]) => [name, copyRange(state, shard.begin, "f32")] as const),
	];
	for (const [state, copy] of states) {
		const nameOf = (name: string) => optimizerName(state, name);
		entries.push(...entriesIn({ dtype: "F32", memory: copy, nameOf }));
	}
	return entries;
}

/** A copy of a range of a buffer, and what its tensors are called there. */
interface CopiedRange {
	readonly dtype: "F32" | "BF16";
	readonly memory: SharedArrayBuffer;
	readonly nameOf: (name: string) => string;
}

function entriesOf(pieces: readonly Piece[], begin: number, copy: CopiedRange): SnapshotEntry[] {
	const bytes = copy.dtype === "F32" ? 4 : 2;
	return pieces.map(({ name, shape, offsets, sizes, position }) => ({
		name: copy.nameOf(name),
		dtype: copy.dtype,
		shape,
		offsets,
		sizes,
		memory: copy.memory,
		byteOffset: (position - begin) * bytes,
	}));
}

/** Rearranges a copy whose first element is element `begin` of the buffer. The moves fill one stretch without gaps. */
function move(copy: SharedArrayBuffer, moves: readonly Move[], begin: number, bytes: number): void {
	if (moves.length === 0) return;
	const first = moves[0]!.to;
	const elements = moves.reduce((sum, one) => sum + one.elements, 0);
	const stretch = new Uint8Array(copy, (first - begin) * bytes, elements * bytes);
	const before = stretch.slice();
	for (const { from, to, elements: count } of moves) {
		stretch.set(before.subarray((from - first) * bytes, (from - first + count) * bytes), (to - first) * bytes);
	}
}

function copyOf(tensor: Tensor, memory: SnapshotMemory): SharedArrayBuffer {
	const bytes = tensor.elements * dtypeBytes[tensor.dtype];
	const block = memory.take(bytes);
	tensor.device.copyToHost(new Uint8Array(block, 0, bytes), tensor);
	return block;
}

/** A bf16 tensor's values in fp32. */
function widenedCopyOf(tensor: Tensor, memory: SnapshotMemory): SharedArrayBuffer {
	const { elements } = tensor;
	const block = memory.take(4 * elements);
	// They lie in the second half until each is widened, first to last: no value is overwritten before it is read.
	const bits = new Uint16Array(block, 2 * elements, elements);
	tensor.device.copyToHost(bits, tensor);
	const wide = new Uint32Array(block, 0, elements);
	for (let i = 0; i < elements; i++) wide[i] = bits[i]! << 16;
	return block;
}
