/**
 * How many patches an image gets (docs/spec/vision.md §5.1): its own size as far as the sample's budget allows, the
 * proportions kept up to whole patches, both sides even where output rows join 2 × 2 patches.
 */

import type { PatchGrid } from "../../models/tower.ts";
import type { ImageSize } from "../../native/images.ts";

export interface DynamicResolution {
	/** Side of a patch in pixels. */
	readonly patchSize: number;
	/** Fewest patches of an image; smaller images are enlarged. 0 = none. */
	readonly minPatches: number;
	/** Most patches of an image; 0 = any number. */
	readonly maxPatches: number;
	/** Pixels the shorter side is enlarged to; 0 = none. */
	readonly minSide: number;
	/** Both sides a multiple of this: 2 with pixel shuffle, else 1. */
	readonly divisor: number;
}

/** Nearest whole number, halves to the even one. */
function roundHalfEven(value: number): number {
	const floor = Math.floor(value);
	const rest = value - floor;
	if (rest !== 0.5) return Math.round(value);
	return floor % 2 === 0 ? floor : floor + 1;
}

/** Grid of one image that may have `available` patches. */
export function imageGrid({ width, height }: ImageSize, available: number, options: DynamicResolution): PatchGrid {
	const { patchSize, minPatches } = options;
	const whole = {
		rows: roundHalfEven(height / patchSize + 0.5),
		columns: roundHalfEven(width / patchSize + 0.5),
	};
	const factor = Math.min(Math.sqrt(available / (whole.rows * whole.columns)), 1);
	let rows = Math.floor(factor * whole.rows);
	let columns = Math.floor(factor * whole.columns);
	if (available > minPatches && rows * columns < minPatches) {
		// A side of no patch at all would make the factor infinite.
		const up = Math.sqrt(minPatches / Math.max(1, rows * columns));
		rows = Math.ceil(up * Math.max(1, rows));
		columns = Math.ceil(up * Math.max(1, columns));
	}
	if (Math.min(rows, columns) * patchSize < options.minSide) {
		({ rows, columns } = enlarge({ rows, columns }, available, options));
	}
	rows = toMultiple(Math.max(1, rows), Math.max(1, columns), available, options.divisor);
	columns = toMultiple(Math.max(1, columns), rows, available, options.divisor);
	return { rows, columns };
}

/** Brings the shorter side to `minSide`, as far as the budget allows. */
function enlarge({ rows, columns }: PatchGrid, available: number, options: DynamicResolution): PatchGrid {
	const { minSide, patchSize } = options;
	const factor = minSide / (Math.min(rows, columns) * patchSize);
	const larger = { rows: Math.ceil(factor * rows), columns: Math.ceil(factor * columns) };
	if (larger.rows * larger.columns <= available) return larger;
	if (columns <= rows) {
		return { rows: Math.max(Math.floor(available / larger.columns), 1), columns: larger.columns };
	}
	const cut = Math.max(Math.floor(available / larger.rows), 1);
	if (cut * patchSize >= minSide) return { rows: larger.rows, columns: cut };
	const up = Math.sqrt(available / (rows * columns));
	return { rows: Math.floor(up * rows), columns: Math.floor(up * columns) };
}

/** A side brought to a multiple of `divisor`: up where the budget allows, else down. */
function toMultiple(side: number, other: number, available: number, divisor: number): number {
	const rest = side % divisor;
	if (rest === 0) return side;
	const up = side + divisor - rest;
	return up * other <= available ? up : Math.max(divisor, side - rest);
}

/**
 * Grids of a sample's images. `budget`: patches all of them may have together; images that cannot become smaller may
 * exceed it, and the sample is cut later.
 */
export function imageGrids(sizes: readonly ImageSize[], budget: number, options: DynamicResolution): PatchGrid[] {
	const { minPatches, maxPatches } = options;
	const total = Math.max(budget, minPatches * sizes.length, 1);
	const most = maxPatches === 0 ? Number.POSITIVE_INFINITY : maxPatches;
	let available = sizes.map(() => Math.max(Math.min(total, most), minPatches));
	let grids: PatchGrid[] = [];
	for (let round = 0; round < 10; round++) {
		grids = sizes.map((size, i) => imageGrid(size, available[i]!, options));
		const patches = grids.map(({ rows, columns }) => rows * columns);
		const sum = patches.reduce((before, count) => before + count, 0);
		if (sum <= total) break;
		const scale = total / sum;
		const smaller = patches.map((count) => Math.max(minPatches, Math.trunc(count * scale)));
		const shrunk = smaller.some((count, i) => count < available[i]!);
		available = shrunk ? smaller : sizes.map(() => minPatches);
	}
	return grids;
}
