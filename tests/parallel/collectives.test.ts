/** Collectives of the CPU library among real processes; each of them runs collectives-rank.ts. */
import { expect, test } from "bun:test";
import { readdirSync } from "node:fs";
import { runRanks } from "./ranks.ts";

// The work grows with the square of the ranks.
for (const ranks of process.env.MIMO_TEST_FULL === "1" ? [1, 2, 3, 5] : [1, 2, 3]) {
	test(`every collective on ${ranks} ranks gives the serial result, twice the same`, async () => {
		const runs = [await runRanks("collectives-rank.ts", ranks), await runRanks("collectives-rank.ts", ranks)];
		for (const outcomes of runs) {
			for (const { stderr, exitCode } of outcomes) expect({ stderr, exitCode }).toEqual({ stderr: "", exitCode: 0 });
		}
		expect(runs[0]!.map(({ stdout }) => stdout)).toEqual(runs[1]!.map(({ stdout }) => stdout));
		expect(readdirSync("/dev/shm").filter((name) => name.startsWith("mimo-run"))).toEqual([]);
	}, 60_000);
}
