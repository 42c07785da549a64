/**
 * Fixed tiles (spec vision 5.3): an image is resized to a grid of square tiles whose proportions are closest to its own,
 * and cut; a small version of the whole may follow.
 */
import type { ImageSize } from "../../native/images.ts";

export interface Tiling {
	/** Side of a tile in pixels. */
	readonly tileSize: number;
	readonly maxTiles: number;
	/** Append the whole image as one tile when there are several. */
	readonly thumbnail: boolean;
}

export interface TileGrid {
	readonly columns: number;
	readonly rows: number;
}

/** Grids of at most `maxTiles` tiles, fewest tiles first. */
function candidates(maxTiles: number): TileGrid[] {
	const grids: TileGrid[] = [];
	for (let columns = 1; columns <= maxTiles; columns++) {
		for (let rows = 1; columns * rows <= maxTiles; rows++) grids.push({ columns, rows });
	}
	return grids.sort((a, b) => a.columns * a.rows - b.columns * b.rows);
}

/** Grid of the closest proportions; of two equally close the larger, where the image has the pixels for it. */
export function tileGrid({ width, height }: ImageSize, { tileSize, maxTiles }: Tiling): TileGrid {
	let best: TileGrid = { columns: 1, rows: 1 };
	let bestDistance = Number.POSITIVE_INFINITY;
	for (const grid of candidates(maxTiles)) {
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
