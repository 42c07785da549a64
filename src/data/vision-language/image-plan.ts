/** Plans of a sample's images: the size each is resized to, and the tiles it is cut into. */

import { outputRows, type RadioConfig } from "../../models/radio/config.ts";
import type { PatchGrid } from "../../models/tower.ts";
import type { ImageSize } from "../../native/images.ts";
import { imageGrids } from "./dynamic-resolution.ts";
import { type Tiling, tileGrids } from "./tiling.ts";

/** The tower's settings that decide the numbers of patches and rows. */
export type TowerGeometry = Pick<RadioConfig, "patchSize" | "pixelShuffle" | "dropClassTokens" | "classTokens">;

/**
 * dynamic: images keep their size within limits in patches (docs/spec/vision.md §5.1). fixed: one size for all. tiles:
 * square tiles of the image's proportions (§5.3).
 */
export type ImageSizing =
	| { readonly mode: "dynamic"; readonly minPatches: number; readonly maxPatches: number; readonly minSide: number }
	| ({ readonly mode: "fixed" } & ImageSize)
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
	/** Size of the whole image that follows the tiles, or null. */
	readonly thumbnail: ImageSize | null;
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
		case "dynamic": {
			const options = { ...sizing, patchSize, divisor: pixelShuffle ? 2 : 1 };
			const grids = imageGrids(sizes, rows * (pixelShuffle ? 4 : 1), options);
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

function gridOf({ width, height }: ImageSize, patchSize: number): PatchGrid {
	return { rows: height / patchSize, columns: width / patchSize };
}

/** Grids of patches of the images the encoder sees: the tiles, then the thumbnail. */
export function patchGrids({ size, columns, rows, thumbnail }: ImagePlan, patchSize: number): PatchGrid[] {
	const tile = gridOf({ width: size.width / columns, height: size.height / rows }, patchSize);
	const tiles = new Array<PatchGrid>(columns * rows).fill(tile);
	return thumbnail === null ? tiles : [...tiles, gridOf(thumbnail, patchSize)];
}

/** Image rows of every image the encoder sees. */
export function rowsOfTiles(plan: ImagePlan, tower: TowerGeometry): number[] {
	return patchGrids(plan, tower.patchSize).map((grid) => outputRows(tower, grid));
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
