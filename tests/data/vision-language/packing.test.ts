/** Which samples share a sequence, how much of the sequences is left empty, and how equal steps with photographs are. */
import { describe, expect, test } from "bun:test";
import { fullestSample, patchCount } from "../../../src/data/mock.ts";
import { choosePacks, type PackingMethod, type Size } from "../../../src/data/vision-language/packing.ts";
import { evennessOf, instructionLengths, photographs, twentyLayers, wasteOf } from "./packing-waste.ts";

const sum = (pack: readonly number[]) => pack.reduce((a, b) => a + b, 0);
const unbounded = Number.POSITIVE_INFINITY;
const text = (tokens: number): Size => ({ tokens, patches: 0, work: 0 });

/** Packs of texts of these lengths. */
function packsOfTexts(lengths: readonly number[], capacity: number, method: PackingMethod) {
	return choosePacks(lengths, text, { tokens: capacity, patches: unbounded }, method);
}

describe("the greedy knapsack", () => {
	test("adds the longest sample that fits", () => {
		expect(packsOfTexts([5, 3, 8, 2, 9, 1], 10, "greedy").groups).toEqual([
			[9, 1],
			[8, 2],
			[5, 3],
		]);
	});

	test("packs every sample that fits within the length", () => {
		const lengths = Array.from({ length: 200 }, (_, i) => ((i * 7919) % 113) + 1);
		const { groups: packs, carried } = packsOfTexts(lengths, 100, "greedy");
		expect(Math.max(...packs.map(sum))).toBeLessThanOrEqual(100);
		expect(packs.flat().sort((a, b) => a - b)).toEqual(lengths.filter((n) => n <= 100).sort((a, b) => a - b));
		expect(carried).toEqual([]);
	});
});

describe("carrying over", () => {
	test("makes the fuller half of the packs and the first sample's, and keeps the order of the rest", () => {
		// Packs: 4 with 6, then 9, 8 and 7 alone; the fuller half are 4 with 6 and 9.
		expect(packsOfTexts([4, 8, 6, 9, 7], 10, "carry-over")).toEqual({ groups: [[4, 6], [9]], carried: [8, 7] });
		expect(packsOfTexts([1, 9, 9], 9, "carry-over")).toEqual({ groups: [[1], [9], [9]], carried: [] });
		expect(packsOfTexts([3], 10, "carry-over")).toEqual({ groups: [[3]], carried: [] });
		expect(packsOfTexts([], 10, "carry-over")).toEqual({ groups: [], carried: [] });
	});

	test("packs every sample that fits, and every division packs the oldest sample", () => {
		for (const method of ["carry-over", "equal-work"] as const) {
			const lengths = Array.from({ length: 300 }, (_, i) => ((i * 7919) % 113) + 1);
			let buffer: number[] = lengths.map((_, place) => place);
			const made: number[] = [];
			const lengthOf = (place: number) => lengths[place]!;
			const sizeOf = (place: number) => ({ ...text(lengthOf(place)), work: (place * 31) % 97 });
			while (buffer.length > 0) {
				const oldest = buffer.find((place) => lengthOf(place) <= 100);
				const { groups, carried } = choosePacks(buffer, sizeOf, { tokens: 100, patches: 0 }, method);
				if (oldest !== undefined) expect(groups.flat()).toContain(oldest);
				for (const pack of groups) expect(sum(pack.map(lengthOf))).toBeLessThanOrEqual(100);
				made.push(...groups.flat());
				buffer = [...carried];
			}
			expect(made.map(lengthOf).sort((a, b) => a - b)).toEqual(
				lengths.filter((length) => length <= 100).sort((a, b) => a - b),
			);
			expect(new Set(made).size).toBe(made.length);
		}
	});

	test("leaves at most 2 % of the sequences empty where the greedy knapsack leaves more", () => {
		for (const capacity of [4096, 16384]) {
			const lengths = instructionLengths(4000, capacity);
			expect(wasteOf(lengths, capacity, 100, "carry-over")).toBeLessThan(0.02);
			expect(wasteOf(lengths, capacity, 100, "greedy")).toBeGreaterThan(0.02);
		}
	});
});

test("packs of equal work are those by length where samples have no pictures", () => {
	const lengths = Array.from({ length: 120 }, (_, place) => 1 + ((place * 7919) % 61));
	expect(packsOfTexts(lengths, 100, "equal-work")).toEqual(packsOfTexts(lengths, 100, "carry-over"));
});

describe("photographs", () => {
	const samples = photographs(4000);
	const size = 200;

	test("make steps of equal work, and fill sequences nearly as packs by length do", () => {
		const even = evennessOf(samples, { size, packer: "equal-work" }, unbounded);
		const byLength = evennessOf(samples, { size, packer: "carry-over" }, unbounded);
		expect(byLength.steps).toBeGreaterThan(0.12);
		expect(even.steps).toBeLessThan(0.03);
		expect(even.most.step).toBeLessThan(1.1);
		expect(even.padding).toBeLessThan(0.006);
	});

	test("have packs of no more patches than the bound, and than mimo plan counts", () => {
		const planned = patchCount(fullestSample(twentyLayers)!.grids);
		const { most } = evennessOf(samples, { size, packer: "equal-work" }, unbounded);
		expect(most.patches).toBeLessThanOrEqual(planned);
		expect(most.patches).toBeGreaterThan(0.95 * planned);
		const bound = 24_000;
		for (const packer of ["carry-over", "equal-work", "greedy"] as const) {
			const bounded = evennessOf(samples, { size, packer }, bound);
			expect(bounded.most.patches).toBeLessThanOrEqual(bound);
			expect(bounded.most.patches).toBeGreaterThan(0.95 * bound);
		}
		const fullest = patchCount(fullestSample({ ...twentyLayers, packingMaxPatches: bound })!.grids);
		expect(fullest).toBeGreaterThan(0.999 * bound);
		expect(fullest).toBeLessThanOrEqual(bound);
	});
});
