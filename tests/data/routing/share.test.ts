/** Images of lanes put together and dealt out; the comparison of what ranks have read. */
import { expect, test } from "bun:test";
import type { ImageSet } from "../../../src/data/images.ts";
import { joinImages } from "../../../src/data/images.ts";
import { shareOfImages } from "../../../src/data/routing/share.ts";
import { compareReports, encodeReports, Trail } from "../../../src/data/routing/trail.ts";

/** Samples of 1 × n grids (0 = no image), patches of two values that count up from `first`. */
function set(first: number, columns: readonly (readonly number[])[]): ImageSet {
	const grids = columns.flat().map((count) => ({ rows: 1, columns: count }));
	const values = 2 * grids.reduce((sum, grid) => sum + grid.columns, 0);
	return {
		patches: Float32Array.from({ length: values }, (_, i) => first + i),
		grids,
		imagesPerSample: columns.map(({ length }) => length),
	};
}

test("lanes one after the other, and dealt out again to as many encoder ranks", () => {
	const lanes = [set(0, [[2], []]), set(100, [[], [1, 3]])];
	const merged = joinImages(lanes);
	expect(merged.imagesPerSample).toEqual([1, 0, 0, 2]);
	expect(merged.grids.map(({ columns }) => columns)).toEqual([2, 1, 3]);
	expect([...merged.patches]).toEqual([0, 1, 2, 3, 100, 101, 102, 103, 104, 105, 106, 107]);
	for (const index of [0, 1]) expect(shareOfImages(merged, { index, count: 2 }, 2)).toEqual(lanes[index]!);
	expect(shareOfImages(merged, { index: 3, count: 4 }, 2)).toEqual(set(100, [[1, 3]]));
	expect(shareOfImages(merged, { index: 1, count: 4 }, 2)).toEqual(set(0, [[]]));
	expect(() => shareOfImages(merged, { index: 0, count: 3 }, 2)).toThrow("4 samples cannot be dealt out to 3");
});

test("ranks that read a lane must have read the same samples", () => {
	const trail = (...names: string[]) => {
		const one = new Trail();
		one.add(names);
		return one;
	};
	const [a, b] = [trail("x", "y"), trail("z")];
	const encoder = encodeReports(
		[
			{ lane: 0, trail: a, images: 3 },
			{ lane: 1, trail: b, images: 1 },
		],
		2,
	);
	const language = (lane: number, of: Trail, images: number) => encodeReports([{ lane, trail: of, images }], 2);
	expect(compareReports([encoder, language(0, a, 3), language(1, b, 1)], 4)).toEqual([3, 1]);
	expect(() => compareReports([encoder, language(0, a, 3), language(1, trail("w"), 1)], 4)).toThrow(
		"Step 4: ranks 0 and 2 have read different samples of data lane 1",
	);
	expect(() => compareReports([encoder, language(0, a, 2), language(1, b, 1)], 4)).toThrow("data lane 0");
	// The order counts, and a saved hash goes on.
	expect(trail("y", "x").hash).not.toBe(a.hash);
	const resumed = new Trail(trail("x").hash);
	resumed.add(["y"]);
	expect(resumed.hash).toBe(a.hash);
});
