/**
 * Learned positions fitted to an image's grid of patches: bilinear, half-pixel centres, no antialiasing, coordinates in
 * fp32 (docs/spec/vision.md §1.4). A patch's position is a weighted sum of at most four rows of the table; both axes
 * are independent.
 */
import type { SparseOutline, SparseRows } from "../../tensor/index.ts";
import type { PatchGrid } from "../tower.ts";
import type { PositionOptions } from "./config.ts";

const f32 = Math.fround;

/** Along one axis: place d reads table indices first[d] and second[d] with weights 1 − λ and λ. */
interface Taps {
	readonly first: Int32Array;
	readonly second: Int32Array;
	readonly lambda: Float32Array;
}

/** A window of the table, in its own coordinates from 0 to 1: origin and size (docs/spec/vision.md §1.4). */
export interface PositionCrop {
	readonly x: number;
	readonly y: number;
	readonly width: number;
	readonly height: number;
}

/** Indices and weight at coordinates 0 … size − 1. */
function tapsAt(count: number, size: number, coordinate: (d: number) => number): Taps {
	const taps = { first: new Int32Array(count), second: new Int32Array(count), lambda: new Float32Array(count) };
	for (let d = 0; d < count; d++) {
		const u = Math.min(Math.max(0, f32(coordinate(d))), size - 1);
		const first = Math.floor(u);
		taps.first[d] = first;
		taps.second[d] = Math.min(first + 1, size - 1);
		taps.lambda[d] = f32(u - first);
	}
	return taps;
}

/** The first `count` places of a resize of `size` entries to `resized`. */
function resize(size: number, resized: number, count: number): Taps {
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
	/** Table entries that places along an axis read: those with a weight. */
	const read = ({ lambda }: Taps) => lambda.reduce((sum, along) => sum + (along === 0 || along === 1 ? 1 : 2), 0);
	let [patches, entries] = [0, 0];
	const known = new Map<PatchGrid, number>();
	for (const [image, grid] of grids.entries()) {
		const crop = crops?.[image] ?? null;
		const counted = crop === null ? known.get(grid) : undefined;
		const count = () => {
			const { y, x } = axes(table, grid, options, crop);
			return read(y) * read(x);
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
	const offsets = new Int32Array(patches + 1);
	const column = new Int32Array(4 * patches);
	const value = new Float32Array(4 * patches);
	let [patch, entry] = [0, 0];
	const push = (row: number, tableColumn: number, weight: number) => {
		if (weight === 0) return;
		column[entry] = row * table.columns + tableColumn;
		value[entry++] = weight;
	};
	for (const [image, grid] of grids.entries()) {
		const { y, x } = axes(table, grid, options, crops?.[image] ?? null);
		for (let i = 0; i < grid.rows; i++) {
			const [top, bottom, down] = [y.first[i]!, y.second[i]!, y.lambda[i]!];
			for (let j = 0; j < grid.columns; j++) {
				const [left, right, along] = [x.first[j]!, x.second[j]!, x.lambda[j]!];
				push(top, left, f32(1 - down) * f32(1 - along));
				push(top, right, f32(1 - down) * along);
				push(bottom, left, down * f32(1 - along));
				push(bottom, right, down * along);
				offsets[++patch] = entry;
			}
		}
	}
	const rows = table.rows * table.columns;
	return { columns: rows, offsets, column: column.subarray(0, entry), value: value.subarray(0, entry) };
}
