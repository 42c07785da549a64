import { expect, test } from "bun:test";
import { TokenSlice } from "../../src/tensor/sequences.ts";

const slice = new TokenSlice([
	{ first: 10, count: 3 },
	{ first: 40, count: 2 },
]);

test("rows of a slice are the tokens of their ranges", () => {
	expect(slice.count).toBe(5);
	expect(slice.rows(2, 2).ranges).toEqual([
		{ first: 12, count: 1 },
		{ first: 40, count: 1 },
	]);
	expect(TokenSlice.of(8, 6).cut({ rank: 1, size: 3 }).ranges).toEqual([{ first: 10, count: 2 }]);
	expect(slice.within(12, 29)).toBe(2);
});

test("the first token is that of neighbours, and a slice without rows has one too", () => {
	expect(TokenSlice.of(8, 6).rows(2, 3).first).toBe(10);
	// The last evaluation may leave a lane an empty microbatch.
	expect(TokenSlice.of(8, 0).rows(0, 0).first).toBe(0);
	expect(() => slice.first).toThrow("not neighbouring tokens");
});
