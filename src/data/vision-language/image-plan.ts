/** Plans of a sample's images: the size each is resized to, and the tiles it is cut into. */

import type { PatchGrid, Picture } from "../../models/tower.ts";
import { rowsOfPicture } from "../../models/vision/pictures.ts";
import { outputRows, type VitConfig } from "../../models/vit/config.ts";
import type { ImageSize } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";

/*
 * Fixed tiles (docs/spec/vision.md §5.3), as InternVL and NVLM have them: an image is resized to a grid of square tiles whose
 * proportions are closest to its own, and cut; a small version of the whole may follow.
 */

interface Tiling {
	/** Side of a tile in pixels. */
	readonly tileSize: number;
	readonly minTiles: number;
	readonly maxTiles: number;
	/** Prefer grids of the image's own number of pixels, where proportions are nearly as close. */
	readonly areaWeighted: boolean;
	/** Append the whole image as one tile when there are several. */
	readonly thumbnail: boolean;
}

interface TileGrid {
	readonly columns: number;
	readonly rows: number;
}

/** Grids of `minTiles` to `maxTiles` tiles, fewest tiles first. */
function candidates(minTiles: number, maxTiles: number): TileGrid[] {
	const grids: TileGrid[] = [];
	for (let columns = 1; columns <= maxTiles; columns++) {
		for (let rows = 1; columns * rows <= maxTiles; rows++) {
			if (columns * rows >= minTiles) grids.push({ columns, rows });
		}
	}
	return grids.sort((a, b) => a.columns * a.rows - b.columns * b.rows);
}

/** Grid of an image: of the closest proportions, or of proportions and pixels. */
export function tileGrid(size: ImageSize, options: Tiling): TileGrid {
	const { minTiles, maxTiles } = options;
	const grids = candidates(Math.min(minTiles, maxTiles), maxTiles);
	return options.areaWeighted ? ofProportionsAndArea(grids, size, options) : ofProportions(grids, size, options);
}

/** The grid that keeps most of the image: up to 0.6 of its pixels, times how close the proportions are. */
function ofProportionsAndArea(
	grids: readonly TileGrid[],
	{ width, height }: ImageSize,
	{ tileSize }: Tiling,
): TileGrid {
	const worth = ({ columns, rows }: TileGrid) => {
		const relative = columns / rows / (width / height);
		const area = (columns * rows * tileSize * tileSize) / (width * height);
		return Math.min(area, 0.6) * Math.min(relative, 1 / relative);
	};
	return grids.reduce((best, grid) => (worth(grid) > worth(best) ? grid : best));
}

/** Of two equally close grids the larger, where the image has the pixels for it. */
function ofProportions(grids: readonly TileGrid[], { width, height }: ImageSize, { tileSize }: Tiling): TileGrid {
	let best = grids[0]!;
	let bestDistance = Number.POSITIVE_INFINITY;
	for (const grid of grids) {
		const { columns, rows } = grid;
		const distance = Math.abs(width / height - columns / rows);
		const enoughPixels = width * height > 0.5 * tileSize * tileSize * columns * rows;
		if (distance < bestDistance || (distance === bestDistance && enoughPixels)) {
			[best, bestDistance] = [grid, distance];
		}
	}
	return best;
}

/** Tiles of an image, the thumbnail included. */
export function tileCount({ columns, rows }: TileGrid, { thumbnail }: Pick<Tiling, "thumbnail">): number {
	return columns * rows + (thumbnail && columns * rows > 1 ? 1 : 0);
}

/** Grids of a sample's images: fewer tiles an image until all together are at most `budget` tiles, or one each. */
function tileGrids(sizes: readonly ImageSize[], budget: number, options: Tiling): TileGrid[] {
	const steps = [options.maxTiles, ...[8, 6, 4, 2, 1].filter((count) => count < options.maxTiles)];
	let grids: TileGrid[] = [];
	for (const maxTiles of steps) {
		grids = sizes.map((size) => tileGrid(size, { ...options, maxTiles }));
		if (grids.reduce((sum, grid) => sum + tileCount(grid, options), 0) <= budget) break;
	}
	return grids;
}

/*
 * How many patches an image gets (docs/spec/vision.md §5.1): its own size as far as the sample's budget allows, the proportions
 * kept up to whole patches, both sides even where output rows join 2 × 2 patches.
 */

interface DynamicResolution {
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

/** An edge of this many times the other makes no picture, as in transformers. */
const longestRatio = 200;

/** Limits of images whose sides are multiples of a block. */
interface BlockLimits {
	readonly minPixels: number;
	readonly maxPixels: number;
	/** Pixels that the shorter side is first enlarged to; 0: none. */
	readonly minSide: number;
}

/** Both sides multiples of `unit`, between the least and the most pixels, in about the image's proportions (docs/spec/vision.md §5.6). */
export function blockSize(image: ImageSize, unit: number, { minPixels, maxPixels, minSide }: BlockLimits): ImageSize {
	const scale = Math.max(1, minSide / image.height, minSide / image.width);
	const [width, height] = [Math.trunc(image.width * scale), Math.trunc(image.height * scale)];
	if (Math.max(width, height) > longestRatio * Math.min(width, height)) {
		throw new UserError(
			`An image of ${image.width} x ${image.height} pixels is more than ${longestRatio} times as long as wide.`,
		);
	}
	const nearest = (side: number) => roundHalfEven(side / unit) * unit;
	const [wide, high] = [nearest(width), nearest(height)];
	if (wide * high > maxPixels) {
		const by = Math.sqrt((height * width) / maxPixels);
		const fit = (side: number) => Math.max(unit, Math.floor(side / by / unit) * unit);
		return { width: fit(width), height: fit(height) };
	}
	if (wide * high >= minPixels) return { width: wide, height: high };
	const by = Math.sqrt(minPixels / (height * width));
	const fit = (side: number) => Math.ceil((side * by) / unit) * unit;
	return { width: fit(width), height: fit(height) };
}

/*
 * Any resolution (docs/spec/vision.md §5.7), as LLaVA-OneVision has it: of given sizes the one that keeps most of the image, cut into
 * tiles, whose rows are resized where they are too many.
 */

interface AnyResolution {
	readonly tileSize: number;
	/** Sizes in whole tiles. */
	readonly pinpoints: readonly ImageSize[];
	/** Tiles whose rows an image may have. */
	readonly maxTiles: number;
}

interface Inset extends ImageSize {
	readonly left: number;
	readonly top: number;
}

/** Throws a UserError for an image so narrow that nothing of it is left in any size. */
function bestResolution({ width, height }: ImageSize, pinpoints: readonly ImageSize[]): ImageSize {
	let best: ImageSize | null = null;
	let [most, least] = [0, Number.POSITIVE_INFINITY];
	for (const size of pinpoints) {
		const scale = Math.min(size.width / width, size.height / height);
		const kept = Math.min(Math.trunc(width * scale) * Math.trunc(height * scale), width * height);
		const wasted = size.width * size.height - kept;
		if (kept > most || (kept === most && wasted < least)) [best, most, least] = [size, kept, wasted];
	}
	if (best !== null) return best;
	throw new UserError(`An image of ${width} x ${height} pixels is too narrow for every size of image-grid-pinpoints.`);
}

/** The image in proportion within `size`, in its middle. */
function insetOf({ width, height }: ImageSize, size: ImageSize): Inset {
	const [wide, high] = [size.width / width, size.height / height];
	const fit =
		wide < high
			? { width: size.width, height: Math.min(Math.ceil(height * wide), size.height) }
			: { width: Math.min(Math.ceil(width * high), size.width), height: size.height };
	return { ...fit, left: Math.floor((size.width - fit.width) / 2), top: Math.floor((size.height - fit.height) / 2) };
}

/** A size in patches from which this many more make transformers resize, and Python's float // of it. */
const resizeAbove = 1.1;
function floorDivide(a: number, b: number): number {
	const quotient = (a - (a % b)) / b;
	return quotient - Math.floor(quotient) > 0.5 ? Math.floor(quotient) + 1 : Math.floor(quotient);
}

function pictureOf({ width, height }: ImageSize, tiles: PatchGrid, tile: PatchGrid, maxTiles: number): Picture {
	const all = { rows: tiles.rows * tile.rows, columns: tiles.columns * tile.columns };
	const whole = (side: number) => Math.trunc(Number(side.toFixed(7)));
	let window = { ...all, top: 0, left: 0 };
	if (width / height > all.columns / all.rows) {
		const top = Math.floor((all.rows - whole(height * (all.columns / width))) / 2);
		window = { ...window, top, rows: all.rows - 2 * top };
	} else {
		const left = Math.floor((all.columns - whole(width * (all.rows / height))) / 2);
		window = { ...window, left, columns: all.columns - 2 * left };
	}
	const { rows, columns } = window;
	const ratio = Math.sqrt((rows * columns) / (maxTiles * tile.rows ** 2));
	const kept =
		ratio > resizeAbove ? { rows: floorDivide(rows, ratio), columns: floorDivide(columns, ratio) } : { rows, columns };
	return { tiles, window, kept };
}

/** The tower's settings that decide the numbers of patches and rows. */
export type TowerGeometry = Pick<VitConfig, "patchSize" | "pixelShuffle" | "dropClassTokens" | "classTokens">;

/**
 * dynamic: images keep their size within limits in patches (docs/spec/vision.md §5.1). fixed: one size for all. tiles:
 * square tiles of the image's proportions (§5.3).
 */
export type ImageSizing =
	| { readonly mode: "dynamic"; readonly minPatches: number; readonly maxPatches: number; readonly minSide: number }
	| ({ readonly mode: "fixed" } & ImageSize)
	/** Multiples of a row's block of patches, limited in pixels (docs/spec/vision.md §5.6). */
	| ({ readonly mode: "blocks" } & BlockLimits)
	| ({ readonly mode: "anyres" } & AnyResolution)
	| ({
			readonly mode: "tiles";
			/** Write a tag before the rows of every tile. */
			readonly tags: boolean;
	  } & Tiling);

export interface ImagePlan {
	readonly mode: ImageSizing["mode"];
	/** Size to resize to. */
	readonly size: ImageSize;
	/** Tiles it is cut into, row-major, all of one size. */
	readonly columns: number;
	readonly rows: number;
	/** Size of the whole image beside the tiles, or null. */
	readonly thumbnail: ImageSize | null;
	/** Where the resized image lies within `size`, on black; absent: it fills it. */
	readonly inset?: Inset;
	/** Whether it is padded to a square of the mean colour before it is resized. */
	readonly squared?: true;
	/** How its rows stand in the text; its first tile is the whole image. Absent: one after the other. */
	readonly picture?: Picture;
	/** Whether a learned row stands behind its rows; absent: no. */
	readonly newline?: true;
}

const whole = (mode: ImagePlan["mode"], size: ImageSize): ImagePlan => ({
	...{ mode, size },
	...{ columns: 1, rows: 1, thumbnail: null },
});

/** Plans of a sample's images; `rows`: image rows that fit beside the text; a tile's tag takes `tagTokens` of them. */
export function planImages(
	sizes: readonly ImageSize[],
	rows: number,
	sizing: ImageSizing,
	tower: TowerGeometry,
	tagTokens = 0,
): ImagePlan[] {
	const { patchSize, pixelShuffle } = tower;
	switch (sizing.mode) {
		case "fixed":
			return sizes.map(() => whole("fixed", { width: sizing.width, height: sizing.height }));
		case "blocks":
			return sizes.map((size) => whole("blocks", blockSize(size, patchSize * (pixelShuffle ? 2 : 1), sizing)));
		case "anyres":
			return sizes.length === 1
				? sizes.map((size) => anyResolution(size, sizing, patchSize))
				: sizes.map(() => ({ ...whole("anyres", tileOf(sizing)), squared: true, newline: true }));
		case "dynamic": {
			const options = { ...sizing, patchSize, divisor: pixelShuffle ? 2 : 1 };
			const grids = imageGrids(sizes, rows * patchesOfRow(tower), options);
			return grids.map((grid) => whole("dynamic", { width: grid.columns * patchSize, height: grid.rows * patchSize }));
		}
		case "tiles": {
			const tile = { width: sizing.tileSize, height: sizing.tileSize };
			const tiles = Math.floor(rows / (outputRows(tower, gridOf(tile, patchSize)) + tagTokens));
			return tileGrids(sizes, tiles, sizing).map((grid) => ({
				...grid,
				mode: "tiles",
				size: { width: grid.columns * tile.width, height: grid.rows * tile.height },
				thumbnail: sizing.thumbnail && grid.columns * grid.rows > 1 ? tile : null,
			}));
		}
	}
}

/** Pixels that make no whole patch are left out at the right and at the bottom. */
function gridOf({ width, height }: ImageSize, patchSize: number): PatchGrid {
	return { rows: Math.floor(height / patchSize), columns: Math.floor(width / patchSize) };
}

const tileOf = ({ tileSize }: Pick<Tiling, "tileSize">): ImageSize => ({ width: tileSize, height: tileSize });

/** The whole image, and tiles of the size that it is resized to in proportion. */
function anyResolution(own: ImageSize, sizing: AnyResolution, patchSize: number): ImagePlan {
	const { tileSize } = sizing;
	const size = bestResolution(own, sizing.pinpoints);
	const tile = gridOf(tileOf(sizing), patchSize);
	const tiles = { rows: size.height / tileSize, columns: size.width / tileSize };
	const { rows, columns } = tiles;
	return {
		...{ mode: "anyres", size, rows, columns, thumbnail: tileOf(sizing), inset: insetOf(own, size), newline: true },
		picture: pictureOf(own, tiles, tile, sizing.maxTiles),
	};
}

/** Grids of patches of the images the encoder sees: the tiles, then the thumbnail; of a picture that first. */
export function patchGrids({ size, columns, rows, thumbnail, picture }: ImagePlan, patchSize: number): PatchGrid[] {
	const tile = gridOf({ width: size.width / columns, height: size.height / rows }, patchSize);
	const tiles = new Array<PatchGrid>(columns * rows).fill(tile);
	if (picture && thumbnail) return [{ ...gridOf(thumbnail, patchSize), picture }, ...tiles];
	return thumbnail === null ? tiles : [...tiles, gridOf(thumbnail, patchSize)];
}

/** Patches of all images that the encoder sees of a plan. */
export function planPatches(plan: ImagePlan, patchSize: number): number {
	return patchGrids(plan, patchSize).reduce((sum, { rows, columns }) => sum + rows * columns, 0);
}

/** Patches that a row of the encoder's output joins. */
export function patchesOfRow({ pixelShuffle }: Pick<TowerGeometry, "pixelShuffle">): number {
	return pixelShuffle ? 4 : 1;
}

/** Image rows of every image the encoder sees; of a picture with learned rows all together. */
export function rowsOfTiles(plan: ImagePlan, tower: TowerGeometry): number[] {
	const grids = patchGrids(plan, tower.patchSize);
	if (plan.newline) return [rowsOfPicture(plan.picture, outputRows(tower, grids[0]!))];
	return grids.map((grid) => outputRows(tower, grid));
}

/** Image rows of a plan: tokens it takes in the sequence, without tags. */
export function planRows(plan: ImagePlan, tower: TowerGeometry): number {
	return rowsOfTiles(plan, tower).reduce((sum, rows) => sum + rows, 0);
}

/** The text before every tile of a plan, as NVLM writes it: the tile's number, or that it is the whole image. */
export function tileTags({ columns, rows, thumbnail }: ImagePlan): string[] {
	const numbered = Array.from({ length: columns * rows }, (_, i) => `<tile_${i + 1}>`);
	return thumbnail === null ? numbered : [...numbered, "<tile_global_thumbnail>"];
}
