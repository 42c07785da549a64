/** Images of lanes put together and dealt out; the comparison of what ranks have read. */
import { expect, test } from "bun:test";
import type { ImageSet } from "../../../src/data/images.ts";
import { joinImages } from "../../../src/data/images.ts";
import {
	compareReports,
	encodeReports,
	exchangeDamage,
	leaveOut,
	mostDamaged,
	Trail,
} from "../../../src/data/routing/agreement.ts";
import { partOfEvery, samplesOfShares, shareOfImages, turnOf } from "../../../src/data/routing/image-share.ts";

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

test("images are divided among encoder ranks, lane after lane", () => {
	const lanes = [set(0, [[2], []]), set(100, [[], [1, 3]])];
	const merged = joinImages(lanes);
	expect(merged.imagesPerSample).toEqual([1, 0, 0, 2]);
	expect(merged.grids.map(({ columns }) => columns)).toEqual([2, 1, 3]);
	expect([...merged.patches]).toEqual([0, 1, 2, 3, 100, 101, 102, 103, 104, 105, 106, 107]);
	for (const index of [0, 1]) expect(shareOfImages(merged, { index, count: 2 }, 0)).toEqual(lanes[index]!);
	expect(shareOfImages(merged, { index: 3, count: 4 }, 0)).toEqual(set(100, [[1, 3]]));
	expect(shareOfImages(merged, { index: 1, count: 4 }, 0)).toEqual(set(0, [[]]));
	// Samples that do not divide: whole microbatches in turn.
	for (const [microbatch, turn] of [0, 1, 2, 0, 1].entries()) {
		for (const index of [0, 1, 2]) {
			const own = shareOfImages(merged, { index, count: 3 }, microbatch);
			expect(own).toEqual(index === turn ? merged : set(0, []));
		}
		expect(samplesOfShares(4, 3, microbatch)[turn]).toBe(4);
	}
	// The data threads cut out a part that is the same of every microbatch, not turns.
	const [half, third] = [
		{ index: 1, count: 2 },
		{ index: 1, count: 3 },
	];
	expect([partOfEvery(half, 4), turnOf(half, 4)]).toEqual([half, { index: 0, count: 1 }]);
	expect([partOfEvery(third, 4), turnOf(third, 4)]).toEqual([{ index: 0, count: 1 }, third]);
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
			{ lane: 0, trail: a, images: 3, damaged: ["x"] },
			{ lane: 1, trail: b, images: 1, damaged: [] },
		],
		2,
	);
	const language = (lane: number, of: Trail, images: number) =>
		encodeReports([{ lane, trail: of, images, damaged: [] }], 2);
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

test("all ranks receive each damaged sample that a rank finds, once", () => {
	const found = [
		[{ lane: 0, microbatch: 2, sample: 5 }],
		[],
		[
			{ lane: 0, microbatch: 2, sample: 5 },
			{ lane: 1, microbatch: 0, sample: 0 },
		],
	];
	const one = new Trail();
	const reports = found.map((damaged) => encodeReports([{ lane: 0, trail: one, images: 1, damaged }], 2));
	expect(mostDamaged(reports)).toBe(2);
	const said: Int32Array[] = [];
	for (const own of found) exchangeDamage(own, 2, (values) => said.slice(0, said.push(values)));
	expect(new Set(said.map(({ length }) => length)).size).toBe(1);
	const heard = exchangeDamage([], 2, () => said);
	expect(heard).toEqual(found[2]!);
	expect(
		exchangeDamage([], 0, () => {
			throw new Error("nothing is exchanged");
		}),
	).toEqual([]);
});

test("the tokens of a skipped sample do not count in any loss", () => {
	const labels = Int32Array.of(1, 2, 3, 4);
	const text = { ids: labels.slice(), labels, lossMask: new Float32Array(4).fill(1), lengths: [1, 2, 1] };
	leaveOut(text, [1, 3]);
	expect([...text.labels]).toEqual([1, -100, -100, 4]);
	expect([...text.lossMask]).toEqual([1, 0, 0, 1]);
});
