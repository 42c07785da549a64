/** Positions fitted to a grid: values computed with exact rational arithmetic (docs/spec/vision.md §G1 and §G2). */
import { describe, expect, test } from "bun:test";
import type { PatchGrid } from "../../../src/models/tower.ts";
import type { PositionOptions } from "../../../src/models/vit/config.ts";
import { type PositionCrop, positionMatrix, positionRows } from "../../../src/models/vit/positions.ts";
import { cropOfImage } from "../../../src/models/vit/tower.ts";

const square: PatchGrid = { rows: 4, columns: 4 };
/** E[y][x] = 10 y² + x³ + 2 x y. */
const table = Array.from({ length: 16 }, (_, i) => {
	const [y, x] = [Math.floor(i / 4), i % 4];
	return 10 * y * y + x ** 3 + 2 * x * y;
});

function fitted(grid: PatchGrid, change: Partial<PositionOptions> = {}, crop?: PositionCrop): number[] {
	const options = { mode: "cpe", aspectRatioSelect: false, randomCrop: true, width: 8, ...change } as const;
	return apply(square, table, grid, options, crop);
}

function apply(
	shape: PatchGrid,
	values: readonly number[],
	grid: PatchGrid,
	options: PositionOptions & { width: number },
	crop?: PositionCrop,
): number[] {
	const { offsets, column, value } = positionRows(shape, [grid], options, crop ? [crop] : null);
	return Array.from({ length: grid.rows * grid.columns }, (_, row) => {
		let sum = 0;
		for (let i = offsets[row]!; i < offsets[row + 1]!; i++) sum += value![i]! * values[column[i]!]!;
		return sum;
	});
}

function expectValues(actual: readonly number[], expected: readonly (readonly number[])[]): void {
	for (const [i, value] of expected.flat().entries()) expect(actual[i]).toBeCloseTo(value, 4);
	expect(actual.length).toBe(expected.flat().length);
}

describe("a 4 × 4 table", () => {
	test("straight to 3 × 5", () => {
		expectValues(fitted({ rows: 3, columns: 5 }, { mode: "direct" }), [
			[1.6666667, 2.6, 6.6666667, 16.1333333, 29.6666667],
			[25, 27.8, 34, 45.6, 61],
			[81.6666667, 86.3333333, 94.6666667, 108.4, 125.6666667],
		]);
	});

	test("evaluated: the square of the longer side, top left corner", () => {
		expectValues(fitted({ rows: 3, columns: 5 }), [
			[0, 0.7, 4.5, 13.7, 27],
			[7, 8.68, 13.6, 23.92, 38.2],
			[25, 27.8, 34, 45.6, 61],
		]);
		expectValues(fitted({ rows: 5, columns: 3 }), [
			[0, 0.7, 4.5],
			[7, 8.68, 13.6],
			[25, 27.8, 34],
			[55, 58.92, 66.4],
			[90, 94.9, 103.5],
		]);
	});

	test("cut to the image's proportions first", () => {
		const expected = [
			[0, 0.7, 4.5, 13.7, 27],
			[10, 12.1, 17.5, 28.3, 43],
			[40, 43.5, 50.5, 62.9, 79],
		];
		expectValues(fitted({ rows: 3, columns: 5 }, { aspectRatioSelect: true }), expected);
		// A square too large for upstream's kernel is cut to proportions too.
		expectValues(fitted({ rows: 3, columns: 5 }, { width: 2 ** 27 } as object), expected);
	});

	test("a window of a training crop", () => {
		const crop = { x: 1 / 4, y: 1 / 8, width: 1 / 2, height: 3 / 4 };
		expectValues(fitted({ rows: 3, columns: 5 }, {}, crop), [
			[5.0625, 6.46875, 9.375, 12.28125, 18.1875],
			[28, 30.25, 34, 37.75, 44.5],
			[75.9375, 79.03125, 83.625, 88.21875, 95.8125],
		]);
	});

	test("a grid of the table's own size is the table, in training too", () => {
		const crop = { x: 0.5, y: 0.5, width: 0.1, height: 0.1 };
		for (const mode of ["cpe", "direct", "window"] as const) expect(fitted(square, { mode }, crop)).toEqual(table);
	});

	test("without CPE: its corner, stretched where the grid is larger", () => {
		expect(fitted({ rows: 2, columns: 3 }, { mode: "window" })).toEqual([0, 1, 8, 10, 13, 22]);
		expectValues(fitted({ rows: 1, columns: 5 }, { mode: "window" }), [[0, 0.7, 4.5, 13.7, 27]]);
	});
});

describe("a table of 128 × 128", () => {
	const large = { rows: 128, columns: 128 };
	const rowNumbers = Array.from({ length: 128 * 128 }, (_, i) => Math.floor(i / 128));
	const options = { mode: "cpe", aspectRatioSelect: false, randomCrop: false, width: 1280 } as const;
	for (const [m, expected] of [
		[32, [1.5, 5.5, 9.5]],
		[64, [0.5, 2.5]],
		[16, [3.5, 11.5]],
		[40, [1.1, 4.3, 7.5]],
		[160, [0, 0.7, 1.5]],
		[256, [0, 0.25, 0.75]],
	] as const) {
		test(`coordinates of ${m} × ${m}`, () => {
			const values = apply(large, rowNumbers, { rows: m, columns: m }, options);
			for (const [i, value] of expected.entries()) expect(values[i * m]).toBeCloseTo(value, 4);
		});
	}

	test("every place reads the table with weights that sum to one", () => {
		const grids = [
			{ rows: 6, columns: 10 },
			{ rows: 2, columns: 2 },
		];
		const crops = grids.map((_, image) => cropOfImage(11, image));
		const { offsets, column, value } = positionRows(large, grids, { ...options, randomCrop: true }, crops);
		expect(offsets.length).toBe(65);
		for (let row = 0; row < 64; row++) {
			const entries = [...value!.subarray(offsets[row], offsets[row + 1])];
			expect(entries.reduce((a, b) => a + b, 0)).toBeCloseTo(1, 6);
			expect(entries.length).toBeLessThanOrEqual(4);
		}
		expect(column.every((c) => c >= 0 && c < 128 * 128)).toBe(true);
	});

	test("entries are counted before they are made", () => {
		const grids = [
			{ rows: 6, columns: 10 },
			{ rows: 32, columns: 32 },
			{ rows: 128, columns: 128 },
			{ rows: 2, columns: 200 },
		];
		const crops = grids.map((_, image) => cropOfImage(11, image));
		for (const given of [null, crops]) {
			const { rows, columns, entries, make } = positionMatrix(large, grids, options, given);
			const { offsets, column } = make();
			expect([rows, columns, entries]).toEqual([offsets.length - 1, 128 * 128, column.length]);
		}
	});
});
