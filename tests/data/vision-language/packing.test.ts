/** Which samples share a sequence, and how much of the sequences is left empty. */
import { describe, expect, test } from "bun:test";
import { choosePacks, greedyKnapsack } from "../../../src/data/vision-language/packing.ts";
import { instructionLengths, wasteOf } from "./packing-waste.ts";

const itself = (length: number) => length;
const sum = (pack: readonly number[]) => pack.reduce((a, b) => a + b, 0);

describe("the greedy knapsack", () => {
	test("adds the longest sample that fits", () => {
		expect(greedyKnapsack([5, 3, 8, 2, 9, 1], itself, 10)).toEqual([
			[9, 1],
			[8, 2],
			[5, 3],
		]);
	});

	test("packs every sample that fits within the length", () => {
		const lengths = Array.from({ length: 200 }, (_, i) => ((i * 7919) % 113) + 1);
		const packs = greedyKnapsack(lengths, itself, 100);
		expect(Math.max(...packs.map(sum))).toBeLessThanOrEqual(100);
		expect(packs.flat().sort((a, b) => a - b)).toEqual(lengths.filter((n) => n <= 100).sort((a, b) => a - b));
		expect(choosePacks(lengths, itself, 100, "greedy")).toEqual({ groups: packs, carried: [] });
	});
});

describe("carrying over", () => {
	test("makes the fuller half of the packs and the first sample's, and keeps the order of the rest", () => {
		// Packs: 4 with 6, then 9, 8 and 7 alone; the fuller half are 4 with 6 and 9.
		expect(choosePacks([4, 8, 6, 9, 7], itself, 10, "carry-over")).toEqual({ groups: [[4, 6], [9]], carried: [8, 7] });
		expect(choosePacks([1, 9, 9], itself, 9, "carry-over")).toEqual({ groups: [[1], [9], [9]], carried: [] });
		expect(choosePacks([3], itself, 10, "carry-over")).toEqual({ groups: [[3]], carried: [] });
		expect(choosePacks([], itself, 10, "carry-over")).toEqual({ groups: [], carried: [] });
	});

	test("packs every sample that fits, and every division packs the oldest sample", () => {
		const lengths = Array.from({ length: 300 }, (_, i) => ((i * 7919) % 113) + 1);
		let buffer: number[] = lengths.map((_, place) => place);
		const made: number[] = [];
		const lengthOf = (place: number) => lengths[place]!;
		while (buffer.length > 0) {
			const oldest = buffer.find((place) => lengthOf(place) <= 100);
			const { groups, carried } = choosePacks(buffer, lengthOf, 100, "carry-over");
			if (oldest !== undefined) expect(groups.flat()).toContain(oldest);
			for (const pack of groups) expect(sum(pack.map(lengthOf))).toBeLessThanOrEqual(100);
			made.push(...groups.flat());
			buffer = [...carried];
		}
		expect(made.map(lengthOf).sort((a, b) => a - b)).toEqual(
			lengths.filter((length) => length <= 100).sort((a, b) => a - b),
		);
		expect(new Set(made).size).toBe(made.length);
	});

	test("leaves at most 2 % of the sequences empty where the greedy knapsack leaves more", () => {
		for (const capacity of [4096, 16384]) {
			const lengths = instructionLengths(4000, capacity);
			expect(wasteOf(lengths, capacity, 100, "carry-over")).toBeLessThan(0.02);
			expect(wasteOf(lengths, capacity, 100, "greedy")).toBeGreaterThan(0.02);
		}
	});
});
