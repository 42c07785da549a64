import { describe, expect, test } from "bun:test";
import { imageGrid, imageGrids, tileCount, tileGrid } from "../../../src/data/vision-language/image-plan.ts";

const options = { patchSize: 16, minPatches: 4, maxPatches: 0, minSide: 0, divisor: 2 };

/** "rows x columns" of one image alone. */
function grid(width: number, height: number, changed: Partial<typeof options> = {}): string {
	const [{ rows, columns }] = imageGrids([{ width, height }], 1 << 20, { ...options, ...changed }) as [
		{ rows: number; columns: number },
	];
	return `${rows}x${columns}`;
}

describe("dynamic resolution (golden G11)", () => {
	const omni = { minPatches: 1024, maxPatches: 13312 };
	for (const [width, height, plain, limited] of [
		[512, 512, "32x32", "32x32"],
		[528, 528, "34x34", "34x34"],
		[800, 600, "38x50", "38x50"],
		[1920, 1080, "68x120", "68x120"],
		[300, 200, "14x20", "28x40"],
		[1000, 37, "4x64", "8x148"],
		[224, 224, "14x14", "32x32"],
		[2550, 3300, "208x160", "130x102"],
	] as const) {
		test(`${width} x ${height}`, () => {
			expect(grid(width, height)).toBe(plain);
			expect(grid(width, height, omni)).toBe(limited);
		});
	}

	test("halves round to the even count: 528 pixels are 34 patches, 512 are 32, 45 are 3", () => {
		const odd = { ...options, divisor: 1, minPatches: 0 };
		const rows = [512, 528, 37].map((side) => imageGrid({ width: side, height: side }, 1 << 20, odd).rows);
		expect(rows).toEqual([32, 34, 3]);
	});

	test("a short side is enlarged to min_side, the long one as far as the budget allows", () => {
		const tall = imageGrid({ width: 64, height: 640 }, 400, { ...options, minSide: 128 });
		expect(tall).toEqual({ rows: 50, columns: 8 });
		const wide = imageGrid({ width: 640, height: 64 }, 400, { ...options, minSide: 128 });
		expect(wide).toEqual({ rows: 8, columns: 50 });
		expect(imageGrid({ width: 64, height: 96 }, 400, { ...options, minSide: 128 })).toEqual({ rows: 12, columns: 8 });
	});

	test("images of a sample share its budget, and never go below min_patches", () => {
		const sizes = [
			{ width: 1024, height: 1024 },
			{ width: 512, height: 256 },
			{ width: 32, height: 32 },
		];
		for (const budget of [100, 1000, 4000, 10000]) {
			const patches = imageGrids(sizes, budget, options).map(({ rows, columns }) => rows * columns);
			expect(patches.reduce((a, b) => a + b)).toBeLessThanOrEqual(budget);
			expect(Math.min(...patches)).toBeGreaterThanOrEqual(4);
		}
		expect(imageGrids(sizes, 1, options)).toEqual(new Array(3).fill({ rows: 2, columns: 2 }));
	});
});

describe("tiles (golden G12)", () => {
	const tiling = { tileSize: 512, minTiles: 1, maxTiles: 12, areaWeighted: false, thumbnail: true };
	for (const [width, height, wanted, tokens] of [
		[512, 512, "1x1", 256],
		[1024, 1024, "2x2", 1280],
		[1000, 600, "3x2", 1792],
		[1920, 1080, "4x2", 2304],
		[600, 1000, "2x3", 1792],
		[300, 900, "1x3", 1024],
		[1280, 1024, "4x3", 3328],
		[3000, 2000, "3x2", 1792],
	] as const) {
		test(`${width} x ${height}`, () => {
			const found = tileGrid({ width, height }, tiling);
			expect(`${found.columns}x${found.rows}`).toBe(wanted);
			expect(tileCount(found, tiling) * 256).toBe(tokens);
		});
	}

	test("between grids of equal proportions, an image with half of the larger grid's pixels gets the larger grid", () => {
		const square = (side: number, areaWeighted = false) =>
			tileGrid({ width: side, height: side }, { ...tiling, areaWeighted });
		// 0.5 · 4 · 512² is 724.1² pixels, 0.5 · 9 · 512² is 1086.1².
		expect([724, 725, 1086, 1087].map((side) => square(side).rows)).toEqual([1, 2, 2, 3]);
		// By proportions and area a grid of 0.6 of the image's pixels is as good as a larger one: 512² / 0.6 is 660.99².
		expect([660, 661].map((side) => square(side, true).rows)).toEqual([1, 2]);
	});

	test("by proportions and area a larger image has more tiles, and every image at least the minimum", () => {
		const shown = ({ columns, rows }: { columns: number; rows: number }) => `${columns}x${rows}`;
		const size = { width: 3000, height: 2000 };
		expect(shown(tileGrid(size, { ...tiling, areaWeighted: true }))).toBe("4x3");
		const small = { width: 100, height: 100 };
		expect(shown(tileGrid(small, tiling))).toBe("1x1");
		expect(shown(tileGrid(small, { ...tiling, minTiles: 4 }))).toBe("2x2");
		expect(shown(tileGrid(small, { ...tiling, minTiles: 4, maxTiles: 2 }))).toBe("1x2");
	});
});
