/** Reads a box of a tensor of any store. */
import type { Box } from "./chunks.ts";
import { dtypes } from "./dtype.ts";
import { type TensorStore, typeOf } from "./store.ts";

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
