/**
 * Learned positions fitted to an image's grid of patches: bilinear, half-pixel centres, no antialiasing, coordinates in
 * fp32, where the mode says nothing else (docs/spec/vision.md §1.4). A patch's position is a weighted sum of rows of the table; both
 * axes are independent.
 */
import type { SparseOutline, SparseRows } from "../../tensor/index.ts";
import type { PatchGrid } from "../tower.ts";
import type { PositionOptions } from "./config.ts";

const f32 = Math.fround;

/** Along one axis: place d reads the table's indices from offsets[d] to offsets[d + 1] of `index`, each with its weight. */
interface Taps {
	readonly offsets: Int32Array;
	readonly index: Int32Array;
	readonly weight: Float32Array;
}

/** The taps of `count` places; `at`: index and weight of each tap of a place. Taps without a weight are left out. */
function taps(count: number, at: (d: number) => readonly (readonly [index: number, weight: number])[]): Taps {
	const offsets = new Int32Array(count + 1);
	const all: (readonly [number, number])[] = [];
	for (let d = 0; d < count; d++) {
		all.push(...at(d).filter(([, weight]) => f32(weight) !== 0));
		offsets[d + 1] = all.length;
	}
	return { offsets, index: Int32Array.from(all, ([i]) => i), weight: Float32Array.from(all, ([, w]) => w) };
}

/** A window of the table, in its own coordinates from 0 to 1: origin and size (docs/spec/vision.md §1.4). */
export interface PositionCrop {
	readonly x: number;
	readonly y: number;
	readonly width: number;
	readonly height: number;
}

/** Bilinear, at coordinates in 0 … size − 1. */
function tapsAt(count: number, size: number, coordinate: (d: number) => number): Taps {
	return taps(count, (d) => {
		const u = Math.min(Math.max(0, f32(coordinate(d))), size - 1);
		const first = Math.floor(u);
		const lambda = f32(u - first);
		return [
			[first, f32(1 - lambda)],
			[Math.min(first + 1, size - 1), lambda],
		];
	});
}

/** A resize of `size` entries to `count` by Keys' bicubic kernel of a = −3/4, half-pixel centres, no antialiasing. */
function bicubic(size: number, count: number): Taps {
	const scale = f32(size / count);
	const a = -0.75;
	const near = (x: number) => ((a + 2) * x - (a + 3)) * x * x + 1;
	const far = (x: number) => ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
	return taps(count, (d) => {
		const u = f32(f32((d + 0.5) * scale) - 0.5);
		const first = Math.floor(u);
		const t = f32(u - first);
		const weights = [far(1 + t), near(t), near(1 - t), far(2 - t)];
		return weights.map((weight, k) => [Math.min(Math.max(0, first - 1 + k), size - 1), weight]);
	});
}

/** A resize of `size` entries to `count` by the triangle, widened where it shrinks, half-pixel centres. */
function antialiased(size: number, count: number): Taps {
	const scale = size / count;
	const support = Math.max(scale, 1);
	return taps(count, (d) => {
		const centre = scale * (d + 0.5);
		const first = Math.max(0, Math.trunc(centre - support + 0.5));
		const end = Math.min(size, Math.trunc(centre + support + 0.5));
		const own = Array.from({ length: end - first }, (_, k) => 1 - Math.abs(first + k + 0.5 - centre) / support);
		const sum = own.reduce((all, weight) => all + Math.max(0, weight), 0);
		return own.map((weight, k) => [first + k, Math.max(0, weight) / sum]);
	});
}

/** The first `count` places of a resize of `size` entries to `resized`. */
export function resize(size: number, resized: number, count: number): Taps {
	const scale = f32(size / resized);
	return tapsAt(count, size, (d) => f32((d + 0.5) * scale) - 0.5);
}

/** `count` places spread over a window, its ends included. */
function spread(size: number, count: number, origin: number, length: number): Taps {
	return tapsAt(count, size, (d) => f32(size - 1) * f32(f32((count > 1 ? d / (count - 1) : 0) * length) + origin));
}

/** The part of the table with the grid's proportions. */
function aspectCrop(table: PatchGrid, grid: PatchGrid): PatchGrid {
	return {
		rows: grid.rows < grid.columns ? Math.ceil((table.rows * grid.rows) / grid.columns) : table.rows,
		columns: grid.columns < grid.rows ? Math.ceil((table.columns * grid.columns) / grid.rows) : table.columns,
	};
}

/** Elements above which upstream resizes straight to the grid. */
const largestSquare = 2 ** 31 - 1;

function axes(
	table: PatchGrid,
	grid: PatchGrid,
	options: PositionOptions & { readonly width: number },
	crop: PositionCrop | null,
): { y: Taps; x: Taps } {
	const fit = (kept: PatchGrid) => ({
		y: resize(kept.rows, grid.rows, grid.rows),
		x: resize(kept.columns, grid.columns, grid.columns),
	});
	if (grid.rows === table.rows && grid.columns === table.columns) return fit(table);
	const select = options.aspectRatioSelect;
	switch (options.mode) {
		case "direct":
			return fit(select ? aspectCrop(table, grid) : table);
		case "aligned":
			return { y: spread(table.rows, grid.rows, 0, 1), x: spread(table.columns, grid.columns, 0, 1) };
		case "bicubic":
			return { y: bicubic(table.rows, grid.rows), x: bicubic(table.columns, grid.columns) };
		case "antialias":
			return { y: antialiased(table.rows, grid.rows), x: antialiased(table.columns, grid.columns) };
		case "none":
			throw new Error("A tower without a table of positions has none to fit.");
		case "window":
			return fit(
				select
					? aspectCrop(table, grid)
					: { rows: Math.min(table.rows, grid.rows), columns: Math.min(table.columns, grid.columns) },
			);
		case "cpe": {
			if (crop) {
				return {
					y: spread(table.rows, grid.rows, crop.y, crop.height),
					x: spread(table.columns, grid.columns, crop.x, crop.width),
				};
			}
			const side = Math.max(grid.rows, grid.columns);
			if (select || options.width * side * side >= largestSquare) return fit(aspectCrop(table, grid));
			return { y: resize(table.rows, side, grid.rows), x: resize(table.columns, side, grid.columns) };
		}
	}
}

/** The matrix of positionRows(), whose entries are counted axis by axis before they are made. */
export function positionMatrix(...given: Parameters<typeof positionRows>): SparseOutline {
	const [table, grids, options, crops = null] = given;
	let [patches, entries] = [0, 0];
	const known = new Map<PatchGrid, number>();
	for (const [image, grid] of grids.entries()) {
		const crop = crops?.[image] ?? null;
		const counted = crop === null ? known.get(grid) : undefined;
		const count = () => {
			const { y, x } = axes(table, grid, options, crop);
			return y.index.length * x.index.length;
		};
		const own = counted ?? count();
		if (crop === null) known.set(grid, own);
		entries += own;
		patches += grid.rows * grid.columns;
	}
	const make = () => positionRows(...given);
	return { rows: patches, columns: table.rows * table.columns, entries, weighted: true, make };
}

/**
 * The matrix that makes the positions of the patches of images, image after image and row by row, of the rows of a table.
 * `width`: elements of a position. `crops`: of every image, or null outside training.
 */
export function positionRows(
	table: PatchGrid,
	grids: readonly PatchGrid[],
	options: PositionOptions & { readonly width: number },
	crops: readonly PositionCrop[] | null = null,
): SparseRows {
	const patches = grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0);
	const fitted = grids.map((grid, image) => axes(table, grid, options, crops?.[image] ?? null));
	const entries = fitted.reduce((sum, { y, x }) => sum + y.index.length * x.index.length, 0);
	const offsets = new Int32Array(patches + 1);
	const column = new Int32Array(entries);
	const value = new Float32Array(entries);
	let [patch, entry] = [0, 0];
	for (const { y, x } of fitted) {
		for (let i = 0; i + 1 < y.offsets.length; i++) {
			for (let j = 0; j + 1 < x.offsets.length; j++) {
				for (let down = y.offsets[i]!; down < y.offsets[i + 1]!; down++) {
					for (let along = x.offsets[j]!; along < x.offsets[j + 1]!; along++) {
						column[entry] = y.index[down]! * table.columns + x.index[along]!;
						value[entry++] = y.weight[down]! * x.weight[along]!;
					}
				}
				offsets[++patch] = entry;
			}
		}
	}
	return { columns: table.rows * table.columns, offsets, column, value };
}
