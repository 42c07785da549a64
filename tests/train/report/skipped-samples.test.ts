/** Messages about samples that are left out: of each kind of mistake, over all ranks, and not too often. */
import { describe, expect, test } from "bun:test";
import { SkippedTally } from "../../../src/data/skipped-samples.ts";
import type { Observer } from "../../../src/observe/step-report.ts";
import { groupOfOne } from "../../../src/parallel/group.ts";
import { SkippedReport } from "../../../src/train/report/skipped-samples.ts";

const damaged = (number: number, key = `k${number}`) => ({
	reason: `Sample ${key}: the image is damaged at byte ${number}.`,
	samples: [{ dataset: "set", shard: "a.tar", key }],
});

/** A report of one rank, and the sentences that it has printed. */
function report(tally: SkippedTally) {
	const said: string[] = [];
	const observer: Observer = { step() {}, evaluation() {}, note: (sentence) => said.push(sentence), close() {} };
	const own = new SkippedReport(groupOfOne("world", 0), tally);
	const step = () => {
		if (own.hasNews) own.tell(observer, 1);
		return said.splice(0);
	};
	const end = () => {
		own.tellRest(observer, 1);
		return said.splice(0);
	};
	return { step, end };
}

describe("a tally", () => {
	test("has a kind for reasons that differ in names and numbers, and counts a sample once", () => {
		const tally = new SkippedTally();
		for (const number of [1, 2, 30, 2]) tally.add(damaged(number));
		tally.add({ reason: 'Sample x cannot be trained on: a turn of "bot".', samples: [] });
		tally.add({ reason: 'Sample y cannot be trained on: a turn of "human 2".', samples: [] });
		expect([...tally.counts.values()]).toEqual([3, 2]);
		expect(tally.take().map(({ reason, names, unnamed }) => [reason, names.length, unnamed])).toEqual([
			["Sample k30: the image is damaged at byte 30.", 3, 0],
			['Sample y cannot be trained on: a turn of "human 2".', 0, 2],
		]);
		tally.add(damaged(30));
		expect(tally.take()).toEqual([]);
	});

	test("of more kinds than anyone reads is bounded", () => {
		const tally = new SkippedTally();
		for (let i = 0; i < 1000; i++) {
			const word = String.fromCharCode(...[...String(i)].map((digit) => 97 + Number(digit)));
			tally.add({ reason: `Sample s is ${word}.`, samples: [] });
		}
		expect(tally.counts.size).toBe(101);
		expect([...tally.counts.values()].reduce((sum, count) => sum + count, 0)).toBe(1000);
	});
});

describe("a report", () => {
	test("speaks at the first, the tenth, the hundredth, and at the end", () => {
		const tally = new SkippedTally();
		const { step, end } = report(tally);
		expect(step()).toEqual([]);
		const counts: number[] = [];
		for (let number = 1; number <= 250; number++) {
			tally.add(damaged(number));
			const lines = step();
			if (lines.length > 0) counts.push(number);
			if (number === 10)
				expect(lines).toEqual(["10 samples are left out, the last: Sample k10: the image is damaged at byte 10."]);
		}
		expect(counts).toEqual([1, 10, 100]);
		expect(end()).toEqual(["250 samples are left out, the last: Sample k250: the image is damaged at byte 250."]);
		expect(end()).toEqual([]);
	});

	test("repeats a remark about samples that are used once, and counts none of them as left out", () => {
		const tally = new SkippedTally();
		const { step, end } = report(tally);
		for (let number = 1; number <= 20; number++) tally.remark(`Image ${number} is white.`);
		expect(step()).toEqual(["Image 1 is white."]);
		tally.remark("Image 21 is white.");
		tally.add(damaged(1));
		expect(step()).toEqual(["1 sample is left out: Sample k1: the image is damaged at byte 1."]);
		expect(end()).toEqual([]);
	});

	test("speaks of every kind by itself", () => {
		const tally = new SkippedTally();
		const { step, end } = report(tally);
		for (let number = 1; number <= 5; number++) tally.add(damaged(number));
		expect(step()).toHaveLength(1);
		tally.add({ reason: "Sample z has no txt; it has png.", samples: [] });
		expect(step()).toEqual(["1 sample is left out: Sample z has no txt; it has png."]);
		expect(end()).toEqual([]);
	});
});
