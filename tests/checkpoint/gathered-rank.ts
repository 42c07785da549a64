/** Rank program of gathered-tensors.test.ts: parts of tensors lie on the ranks, and each rank reads its share of the whole; prints failures. */
import { GatheredTensors, type NamedTensors, readTensor, shareOf } from "../../src/checkpoint/index.ts";
import type { ShardBlock } from "../../src/parallel/index.ts";
import { World } from "../../src/parallel/world.ts";
import { elementCount, type FloatDtype, Tensor } from "../../src/tensor/index.ts";
import { deviceOfRank, placeOfRank } from "../parallel/ranks.ts";

using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const group = await world.group("model", [...Array(world.size).keys()]);
const { rank, size } = group;

/** How a tensor of these rows and columns lies on the ranks. */
type Layout = "whole" | "rows" | "columns" | "halves" | "swapped" | "one";
const cases: readonly (readonly [layout: Layout, dtype: FloatDtype, shape: readonly number[]])[] = [
	["whole", "f32", [7, 5]],
	["rows", "bf16", [12, 5]],
	["columns", "f32", [5, 12]],
	["halves", "f32", [24, 3, 2]],
	["swapped", "bf16", [4, 12]],
	["one", "f32", [9, 3]],
	["rows", "f32", [12]],
	// More than ranks exchange at once, by rows and by columns.
	["rows", "bf16", [3 * 9000, 1000]],
	["columns", "f32", [9000, 3000]],
];

/** Values that tell where they stand. */
const valueAt = (i: number, at: number, dtype: FloatDtype) => (dtype === "f32" ? (at % 2 ** 24) + i / 16 : at % 65521);

function blocksOf(layout: Layout, rows: number, columns: number): { shape: [number, number]; blocks: ShardBlock[] } {
	const block = { localRow: 0, fullRow: 0, rows, localColumn: 0, fullColumn: 0, columns };
	const [r, c] = [rows / size, columns / size];
	switch (layout) {
		case "rows":
			return { shape: [r, columns], blocks: [{ ...block, fullRow: rank * r, rows: r }] };
		case "columns":
			return { shape: [rows, c], blocks: [{ ...block, fullColumn: rank * c, columns: c }] };
		case "halves": {
			// A part of the upper rows and one of the lower, as of gated products.
			const half = r / 2;
			const upper = { ...block, fullRow: rank * half, rows: half };
			return { shape: [r, columns], blocks: [upper, { ...upper, localRow: half, fullRow: rows / 2 + rank * half }] };
		}
		case "swapped": {
			// Two parts of the columns, the later first.
			const half = c / 2;
			const left = { ...block, fullColumn: columns / 2 + rank * half, columns: half };
			return { shape: [rows, c], blocks: [left, { ...left, localColumn: half, fullColumn: rank * half }] };
		}
		default:
			return { shape: [rows, columns], blocks: [block] };
	}
}

const model: NamedTensors = {
	*logicalTensors() {
		for (const [i, [layout, dtype, shape]] of cases.entries()) {
			if (layout === "one" && rank !== size - 1) continue;
			const columns = elementCount(shape.slice(1));
			const { shape: local, blocks } = blocksOf(layout, shape[0]!, columns);
			const values = dtype === "f32" ? new Float32Array(elementCount(local)) : new Uint16Array(elementCount(local));
			for (const block of blocks) {
				for (let row = 0; row < block.rows; row++) {
					for (let column = 0; column < block.columns; column++) {
						const at = (block.fullRow + row) * columns + block.fullColumn + column;
						values[(block.localRow + row) * local[1] + block.localColumn + column] = valueAt(i, at, dtype);
					}
				}
			}
			const value = Tensor.empty(device, local, dtype);
			device.copyToDevice(value, values);
			yield { name: `tensor.${i}`, shape, value, gradient: null, blocks };
		}
	},
};

using gathered = new GatheredTensors("tensors", model, group, device);
let read = 0;
for (const names of shareOf(gathered, gathered)) {
	for (const name of names) {
		const i = Number(name.slice("tensor.".length));
		const [layout, dtype] = cases[i]!;
		const values = readTensor(gathered, name) as Float32Array | Uint16Array;
		const wrong = values.findIndex((value, at) => value !== Math.fround(valueAt(i, at, dtype)));
		if (wrong >= 0) console.log(`${layout} ${name}: element ${wrong} is ${values[wrong]}`);
		// A range that begins and ends within rows.
		const bytes = values.byteLength / values.length;
		const [from, to] = [Math.floor(values.length / 3), values.length - 2];
		const range = new Uint8Array((to - from) * bytes);
		gathered.readInto(name, from * bytes, range);
		const expected = new Uint8Array(values.buffer, values.byteOffset + from * bytes, range.length);
		if (Buffer.compare(range, expected) !== 0) console.log(`${layout} ${name}: elements ${from} to ${to} differ`);
		read++;
	}
}
console.log(`read ${read}`);
