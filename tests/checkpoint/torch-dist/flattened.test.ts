import { expect, test } from "bun:test";
import { readTensor } from "../../../src/checkpoint/store.ts";
import { unflatten } from "../../../src/checkpoint/torch-dist/common.ts";
import { memoryStore } from "../memory-store.ts";

/** Cells of a grid over [X, Y, …], each flattened, as the old writer stored them. */
function flatten(values: Float32Array, shape: readonly number[], grid: readonly number[]): Float32Array {
	const cell = shape.map((size, axis) => size / grid[axis]!);
	const count = (sizes: readonly number[]) => sizes.reduce((n, size) => n * size, 1);
	const unravel = (index: number, sizes: readonly number[]) => {
		const at: number[] = [];
		for (const size of sizes.toReversed()) {
			at.unshift(index % size);
			index = Math.floor(index / size);
		}
		return at;
	};
	const flat: number[] = [];
	for (let c = 0; c < count(grid); c++) {
		for (let e = 0; e < count(cell); e++) {
			const [cells, inside] = [unravel(c, grid), unravel(e, cell)];
			flat.push(values[shape.reduce((sum, size, axis) => sum * size + cells[axis]! * cell[axis]! + inside[axis]!, 0)]!);
		}
	}
	return Float32Array.from(flat);
}

for (const [shape, grid] of [
	[[12], [3]],
	[
		[6, 8],
		[2, 4],
	],
	[
		[6, 8],
		[1, 1],
	],
	[
		[4, 6, 10],
		[2, 3, 5],
	],
	[
		[2, 4, 3, 8],
		[2, 2, 1, 2],
	],
] as const) {
	test(`[${shape}] in a grid of [${grid}]`, () => {
		const elements = shape.reduce((n, size) => n * size, 1);
		const values = Float32Array.from({ length: elements }, (_, i) => i);
		const cell = elements / grid.reduce<number>((n, size) => n * size, 1);
		const stored = memoryStore({ w: { shape: [...grid, cell], values: flatten(values, shape, grid) } });
		const whole = unflatten(stored, new Map([["w", shape]]));
		expect(whole.tensors.get("w")!.shape).toEqual([...shape]);
		expect(readTensor(whole, "w")).toEqual(values);
	});
}

test("shapes that do not fit are named; without flattened tensors nothing changes", () => {
	const stored = memoryStore({ w: { shape: [2, 6], values: new Float32Array(12) } });
	expect(unflatten(stored, new Map())).toBe(stored);
	expect(() => unflatten(stored, new Map([["w", [5]]]))).toThrow(
		"w of shape [2,6] is not a flattened tensor of shape [5]",
	);
});
