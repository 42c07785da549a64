/** Rows between lanes of both modules: fan-in, fan-out, on ranks of their own and on shared ones, uneven counts, samples and microbatches without rows, microbatches in turn. */
import { expect, test } from "bun:test";
import { runRanks } from "./ranks.ts";

/** Rows of eight samples in five microbatches: uneven, with zeros, one microbatch without rows, the last with few. */
const counts = [
	[3, 1, 4, 2, 0, 5, 2, 6],
	[1, 0, 0, 7, 3, 3, 0, 1],
	[0, 0, 0, 0, 0, 0, 0, 0],
	[2, 2, 2, 2, 2, 2, 2, 2],
	[0, 0, 0, 9, 0, 0, 0, 0],
];

for (const layout of [
	"1+1",
	"1+4",
	"2+4",
	"tp2dp2+tp2dp2",
	"4+2",
	"4+1",
	"tp2dp4+tp2",
	"dp2|tp2",
	"tp2|dp2",
	"dp4|tp2dp2",
	"tp2dp2|dp4",
	"tp4|dp4",
	"3+1",
	"dp3|tp3",
]) {
	test(layout, async () => {
		const ranks =
			{ "1+1": 2, "1+4": 5, "2+4": 6, "tp2dp2+tp2dp2": 8, "4+2": 6, "4+1": 5, "tp2dp4+tp2": 10, "3+1": 4 }[layout] ??
			(/4|tp2dp2/.test(layout) ? 4 : /3/.test(layout) ? 3 : 2);
		const outcomes = await runRanks("edge-rank.ts", ranks, [layout, JSON.stringify(counts)]);
		for (const { exitCode, stdout, stderr } of outcomes) {
			expect({ exitCode, stdout, stderr }).toEqual({ exitCode: 0, stdout: "", stderr: "" });
		}
	}, 60_000);
}
