/** Which ranks are named as slow, and when. */
import { expect, test } from "bun:test";
import { SlowRanks } from "../../../src/train/report/slow-ranks.ts";

test("a rank is named after so many steps in a row, once, and again when it was fast in between", () => {
	const slow = new SlowRanks([[0, 1, 2, 3]], 3);
	const even = [0.01, 0.011, 0.01, 0.012];
	const late = [0.01, 0.02, 0.01, 0.012];
	const said = [late, late, even, late, late, late, late, even, late, late, late].map((busy, at) =>
		slow.step(at + 1, busy),
	);
	const sentence = (step: number) =>
		`Rank 1 is slow: in each of the 3 steps up to ${step} it worked longer than ranks with the same work, 20.0 ms on average, their median 10.0 ms.`;
	expect(said).toEqual([[], [], [], [], [], [sentence(6)], [], [], [], [], [sentence(11)]]);
});

test("ranks are compared with those of their stage alone, and one that is alone with none", () => {
	const slow = new SlowRanks([[0, 1], [2, 3], [4]], 1);
	expect(slow.step(1, [0.01, 0.01, 0.03, 0.03, 0.09])).toEqual([]);
	expect(slow.step(2, [0.01, 0.01, 0.03, 0.04, 0.09])).toEqual([
		"Rank 3 is slow: in each of the 1 steps up to 2 it worked longer than ranks with the same work, 40.0 ms on average, their median 30.0 ms.",
	]);
});
