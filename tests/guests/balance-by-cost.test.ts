/** Deals of items by their cost. */
import { describe, expect, test } from "bun:test";
import { asRead, balanceByCost, balanceStep, workOf } from "../../src/guests/balance/balance.ts";
import { numbersFrom } from "../../src/parity/verify/samples.ts";

describe("items dealt out by cost", () => {
	test("stay where they are when all cost the same", () => {
		expect(
			balanceByCost([
				[5, 5],
				[5, 5],
				[5, 5],
			]),
		).toEqual([
			[0, 0],
			[1, 1],
			[2, 2],
		]);
	});

	test("move only as far as they make the heaviest lane lighter", () => {
		expect(balanceByCost([[8], [1, 1, 1]])).toEqual([[0], [1, 1, 1]]);
		expect(workOf([[8, 4, 4], []], balanceByCost([[8, 4, 4], []]))).toEqual([8, 8]);
		// The first two stay, the third goes.
		expect(balanceByCost([[4, 4, 4], [4]])).toEqual([[0, 0, 1], [1]]);
	});

	test("leave the heaviest lane at most 4/3 of what any deal leaves, and a hundredth", () => {
		const next = numbersFrom(7);
		for (let round = 0; round < 200; round++) {
			const costs = Array.from({ length: 2 + Math.floor(next() * 7) }, () =>
				Array.from({ length: Math.floor(next() * 6) }, () => 1 + Math.floor(1000 * next() ** 4)),
			);
			const all = costs.flat();
			const bound = Math.max(0, ...all, all.reduce((sum, cost) => sum + cost, 0) / costs.length);
			const most = Math.max(...workOf(costs, balanceByCost(costs)));
			// No deal is below `bound`; two large items on one lane of many can keep the best deal above it.
			const pair = all.toSorted((a, b) => b - a);
			const forced = (pair[costs.length - 1] ?? 0) + (pair[costs.length] ?? 0);
			expect(most).toBeLessThanOrEqual(1.01 * (4 / 3) * Math.max(bound, forced));
		}
	});

	test("give no lane more patches than the lane with most has read", () => {
		// By cost the third lane would get all small items of the first two.
		const costs = [[...new Array(8).fill(4)], [...new Array(8).fill(4)], [50, 50]];
		const patches = [[...new Array(8).fill(4)], [...new Array(8).fill(4)], [15, 15]];
		expect(Math.max(...workOf(patches, balanceByCost(costs)))).toBeGreaterThan(32);
		const dealt = balanceByCost(costs, patches);
		expect(Math.max(...workOf(patches, dealt))).toBeLessThanOrEqual(32);
		expect(Math.max(...workOf(costs, dealt))).toBeLessThan(100);
		const roomy = balanceByCost(costs, patches, 40);
		expect(Math.max(...workOf(patches, roomy))).toBeWithin(33, 41);
		expect(Math.max(...workOf(costs, roomy))).toBeLessThan(Math.max(...workOf(costs, dealt)));
		const next = numbersFrom(9);
		const [most, moved] = [{ patches: 0 }, { rounds: 0 }];
		for (let round = 0; round < 200; round++) {
			const sizes = Array.from({ length: 4 }, () =>
				Array.from({ length: 1 + Math.floor(next() * 6) }, () => 1 + Math.floor(100 * next() ** 3)),
			);
			const squares = sizes.map((own) => own.map((size) => size ** 2 + size));
			const deal = balanceByCost(squares, sizes);
			const read = Math.max(...sizes.map((own) => own.reduce((sum, size) => sum + size, 0)));
			most.patches = Math.max(most.patches, ...workOf(sizes, deal).map((held) => held / read));
			if (Math.max(...workOf(squares, deal)) < Math.max(...workOf(squares, asRead(squares)))) moved.rounds++;
		}
		expect(most.patches).toBeLessThanOrEqual(1);
		expect(moved.rounds).toBeGreaterThan(150);
	});

	test("are kept in a step only where they are worth that lanes wait in every microbatch", () => {
		// Each lane has the large item of one microbatch: by the end of the step they are even.
		const turns = [
			[[9], [1, 1, 1]],
			[[1, 1, 1], [9]],
		];
		expect(balanceStep(turns, "every step")).toEqual(turns.map(asRead));
		const skewed = [
			[[4, 4], [1]],
			[[4, 4], [1]],
		];
		expect(balanceStep(skewed, "every step")).toEqual(skewed.map((costs) => balanceByCost(costs)));
		const mixed = [
			[[4, 4], []],
			[[], [4, 4]],
		];
		expect(balanceStep(mixed, "every step")).toEqual(mixed.map(asRead));
		expect(balanceStep(mixed, "every microbatch")).toEqual([
			[[0, 1], []],
			[[], [1, 0]],
		]);
	});

	test("are empty where no lane has any", () => {
		expect(balanceByCost([[], []])).toEqual([[], []]);
	});
});
