/** Boxes of tensors, read row by row or many rows at once. */
import { expect, test } from "bun:test";
import { readRegion } from "../../src/checkpoint/training/restore.ts";
import { memoryStore } from "./memory-store.ts";

test("every box of tensors of one to three dimensions", () => {
	for (const shape of [[9], [5, 7], [3, 4, 5]]) {
		const count = shape.reduce((product, size) => product * size, 1);
		const values = Float32Array.from({ length: count }, (_, i) => i);
		using store = memoryStore({ w: { shape, values } });
		const ranges = shape.map((size) =>
			Array.from({ length: size }, (_, offset) =>
				Array.from({ length: size - offset }, (_, length) => [offset, length + 1] as const),
			).flat(),
		);
		const boxes = ranges.reduce<(readonly (readonly [number, number])[])[]>(
			(all, axis) => all.flatMap((box) => axis.map((range) => [...box, range])),
			[[]],
		);
		for (const box of boxes) {
			const offsets = box.map(([offset]) => offset);
			const sizes = box.map(([, size]) => size);
			const expected: number[] = [];
			const visit = (axis: number, at: number) => {
				if (axis === shape.length) {
					expected.push(at);
					return;
				}
				for (let i = 0; i < sizes[axis]!; i++) visit(axis + 1, at * shape[axis]! + offsets[axis]! + i);
			};
			visit(0, 0);
			const read = new Float32Array(expected.length);
			readRegion(store, "w", { offsets, sizes }, new Uint8Array(read.buffer));
			expect([...read]).toEqual(expected);
		}
	}
});

test("rows that are too wide for one read", () => {
	const shape = [3, 2 ** 20 + 8];
	const values = Float32Array.from({ length: shape[0]! * shape[1]! }, (_, i) => i % 65521);
	using store = memoryStore({ w: { shape, values } });
	for (const [offset, size] of [
		[5, 2 ** 20],
		[2 ** 19, 3],
	] as const) {
		const read = new Float32Array(2 * size);
		readRegion(store, "w", { offsets: [1, offset], sizes: [2, size] }, new Uint8Array(read.buffer));
		for (const [row, at] of [
			[0, 0],
			[1, size - 1],
		] as const) {
			expect(read[row * size + at]).toBe(values[(1 + row) * shape[1]! + offset + at]!);
		}
	}
});
