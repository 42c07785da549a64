/**
 * Fills this rank's part of a training from a checkpoint, whatever layout wrote it. Weights alone, or with the optimizer's
 * state; fp32 masters always come from the most exact source there is (docs/spec/checkpoint.md §6.6).
 */
import { UserError } from "../../system/errors.ts";
import { roundToBf16, type Tensor } from "../../tensor/index.ts";
import type { Box } from "../chunks.ts";
import { fromLayout } from "../conversion/layouts.ts";
import { dtypes } from "../dtype.ts";
import type { NativeCheckpoint } from "../native/reader.ts";
import { type TensorStore, typeOf } from "../store.ts";
import {
	type LocalPart,
	optimizerName,
	type Piece,
	piecesOf,
	type StoredBuffer,
	type StoredTensors,
} from "./tensors.ts";

export interface Restored {
	/** Weights that are not their fp32 masters rounded to bf16: they were changed apart. */
	readonly differing: readonly string[];
}

/** Elements that are read at once. */
const largestRead = 2 ** 26;

/**
 * `optimizer`: restore its state too; without, masters follow the weights and moments are left alone. `elements`: the
 * most that are in host memory at once.
 */
export function restoreTensors(
	tensors: StoredTensors,
	store: TensorStore,
	{ optimizer, elements = largestRead }: { readonly optimizer: boolean; readonly elements?: number },
): Restored {
	const differing = new Set<string>();
	for (const stored of tensors.buffers) {
		for (let begin = 0; begin < stored.buffer.elements; begin += elements) {
			const end = Math.min(stored.buffer.elements, begin + elements);
			restoreRange(stored, begin, end, store, optimizer, differing);
		}
	}
	for (const { name, shape, value } of tensors.loose) {
		const values = new Float32Array(value.elements);
		const box = { offsets: shape.map(() => 0), sizes: shape };
		readFloats(store, name, { ...box, name, shape, position: 0, elements: values.length }, values, 0);
		value.device.copyToDevice(value, values);
	}
	return { differing: [...differing] };
}

/** Elements [begin, end) of a buffer, and of the optimizer's part of them. */
function restoreRange(
	{ buffer, shard, parts }: StoredBuffer,
	begin: number,
	end: number,
	store: TensorStore,
	optimizer: boolean,
	differing: Set<string>,
): void {
	const { device } = buffer.values;
	const read = (from: number, to: number, nameOf: (name: string) => string) =>
		readParts(parts, from, to, store, nameOf);
	const fill = (flat: Tensor, first: number, from: number, values: Float32Array) => {
		using range = flat.columns(from - first, values.length);
		device.copyToDevice(range, flat.dtype === "bf16" ? roundToBf16(values) : values);
	};
	const plain = (name: string) => name;
	const masterName = (name: string) => optimizerName("param", name);
	const separate = buffer.dtype !== "f32";
	// A trained fp32 weight is its own master.
	fill(buffer.values, 0, begin, read(begin, end, optimizer && shard !== null && !separate ? masterName : plain));
	if (shard === null) return;
	const [from, to] = [Math.max(begin, shard.begin), Math.min(end, shard.end)];
	if (from >= to) return;
	if (separate) {
		const exact = read(from, to, optimizer ? masterName : plain);
		fill(shard.master, shard.begin, from, exact);
		if (optimizer) compareRounded(buffer.values, exact, from, parts, differing);
	}
	if (!optimizer) return;
	for (const [state, tensor] of shard.states) {
		const values = read(from, to, (name) => optimizerName(state, name));
		fill(tensor, shard.begin, from, values);
	}
}

/** Elements [begin, end) of a flat buffer; elements between tensors are zero. */
function readParts(
	parts: readonly LocalPart[],
	begin: number,
	end: number,
	store: TensorStore,
	nameOf: (name: string) => string,
): Float32Array {
	const values = new Float32Array(end - begin);
	for (const part of parts) {
		for (const piece of piecesOf(part, begin, end)) readFloats(store, nameOf(part.name), piece, values, begin);
	}
	return values;
}

/** Reads a box and widens it to fp32. */
function readFloats(store: TensorStore, name: string, piece: Piece, values: Float32Array, begin: number): void {
	const { dtype } = typeOf(store, name);
	const target = values.subarray(piece.position - begin, piece.position - begin + piece.elements);
	if (dtype === "F32") {
		readRegion(store, name, piece, new Uint8Array(target.buffer, target.byteOffset, target.byteLength));
		return;
	}
	if (dtype !== "BF16" && dtype !== "F16") {
		throw new UserError(`${name} in ${store.path} is ${dtype}; weights are F32, BF16 or F16.`);
	}
	const bits = new Uint16Array(piece.elements);
	readRegion(store, name, piece, new Uint8Array(bits.buffer));
	if (dtype === "F16") {
		target.set(new Float16Array(bits.buffer));
		return;
	}
	const wide = new Uint32Array(target.buffer, target.byteOffset, target.length);
	for (let i = 0; i < wide.length; i++) wide[i] = bits[i]! << 16;
}

/** Notes the weights of a bf16 buffer that are not their masters, rounded. */
function compareRounded(
	values: Tensor,
	masters: Float32Array,
	begin: number,
	parts: readonly LocalPart[],
	differing: Set<string>,
): void {
	const stored = new Uint16Array(masters.length);
	using range = values.columns(begin, masters.length);
	values.device.copyToHost(stored, range);
	const rounded = roundToBf16(masters);
	for (const part of parts) {
		for (const { name, position, elements } of piecesOf(part, begin, begin + masters.length)) {
			for (let i = position - begin; i < position - begin + elements; i++) {
				if (stored[i] === rounded[i]) continue;
				differing.add(name);
				break;
			}
		}
	}
}

/** Rows that are read together when a box takes only a part of each. */
const LARGEST_SPAN = 2 ** 22;

/** Fills `into` with the box's values in row-major order. The box lies inside the tensor. */
export function readRegion(store: TensorStore, name: string, { offsets, sizes }: Box, into: Uint8Array): void {
	const { dtype, shape } = typeOf(store, name);
	if (sizes.includes(0)) return;
	const elementBytes = dtypes[dtype].bits / 8;
	// From the cut axis on the box is one run.
	let cut = shape.length - 1;
	while (cut > 0 && sizes[cut] === shape[cut]) cut--;
	const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((n, size) => n * size, elementBytes));
	const runBytes = shape.length === 0 ? elementBytes : sizes[cut]! * strides[cut]!;
	let done = 0;
	/** Bytes of `axis` and below begin at `start` of the tensor. */
	const visit = (axis: number, start: number): void => {
		if (axis >= cut) {
			const at = start + (shape.length === 0 ? 0 : offsets[cut]! * strides[cut]!);
			store.readInto(name, at, into.subarray(done, done + runBytes));
			done += runBytes;
			return;
		}
		const first = start + offsets[axis]! * strides[axis]!;
		if (axis === cut - 1 && runBytes * 2 < LARGEST_SPAN) {
			done = readRows(store, name, first, { stride: strides[axis]!, count: sizes[axis]! }, into, done, {
				skip: offsets[cut]! * strides[cut]!,
				bytes: runBytes,
			});
			return;
		}
		for (let i = 0; i < sizes[axis]!; i++) visit(axis + 1, first + i * strides[axis]!);
	};
	visit(0, 0);
}

/** A run of every row, rows read together; returns where the next run goes. */
function readRows(
	store: TensorStore,
	name: string,
	first: number,
	rows: { readonly stride: number; readonly count: number },
	into: Uint8Array,
	target: number,
	run: { readonly skip: number; readonly bytes: number },
): number {
	const together = Math.max(1, Math.floor(LARGEST_SPAN / rows.stride));
	let done = target;
	for (let row = 0; row < rows.count; row += together) {
		const count = Math.min(together, rows.count - row);
		const span = new Uint8Array((count - 1) * rows.stride + run.bytes);
		store.readInto(name, first + row * rows.stride + run.skip, span);
		for (let i = 0; i < count; i++) {
			into.set(span.subarray(i * rows.stride, i * rows.stride + run.bytes), done);
			done += run.bytes;
		}
	}
	return done;
}

// A native checkpoint as a run reads it: its tensors as if no conversion had given them another layout.

/** Disposing it disposes the checkpoint. */
type CanonicalCheckpoint = TensorStore & Pick<NativeCheckpoint, "manifest" | "readObject">;

/**
 * Experts one by one, gated rows in halves, layers numbered one by one (docs/spec/checkpoint.md §5); the optimizer's tensors
 * alike. Throws a UserError where tensors do not make the layout that the index says.
 */
export function canonicalCheckpoint(checkpoint: NativeCheckpoint): CanonicalCheckpoint {
	const { manifest, path } = checkpoint;
	const store = fromLayout(checkpoint, { ...manifest.layout, gluTensorParallel: 1 }, path);
	if (store === checkpoint) return checkpoint;
	return {
		path,
		tensors: store.tensors,
		originsOf: (name) => store.originsOf?.(name) ?? [],
		readInto: (name, offset, into) => store.readInto(name, offset, into),
		manifest,
		readObject: (name) => checkpoint.readObject(name),
		[Symbol.dispose]: () => checkpoint[Symbol.dispose](),
	};
}
