/**
 * Fixed tiles (docs/spec/vision.md §5.3), as InternVL and NVLM have them: an image is resized to a grid of square tiles whose
 * proportions are closest to its own, and cut; a small version of the whole may follow.
 */
import type { ImageSize } from "../../native/images.ts";

export interface Tiling {
	/** Side of a tile in pixels. */
	readonly tileSize: number;
	readonly minTiles: number;
	readonly maxTiles: number;
	/** Prefer grids of the image's own number of pixels, where proportions are nearly as close. */
	readonly areaWeighted: boolean;
	/** Append the whole image as one tile when there are several. */
	readonly thumbnail: boolean;
}

export interface TileGrid {
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
export function tileGrids(sizes: readonly ImageSize[], budget: number, options: Tiling): TileGrid[] {
	const steps = [options.maxTiles, ...[8, 6, 4, 2, 1].filter((count) => count < options.maxTiles)];
	let grids: TileGrid[] = [];
	for (const maxTiles of steps) {
		grids = sizes.map((size) => tileGrid(size, { ...options, maxTiles }));
		if (grids.reduce((sum, grid) => sum + tileCount(grid, options), 0) <= budget) break;
	}
	return grids;
}
