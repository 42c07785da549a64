/** Exchanges of experts' rows among four processes equal those that the host plans; expert-exchange-rank.ts is each of them. */
import { expect, test } from "bun:test";
import { balancedRows, rowCapacity } from "../../src/parallel/experts/members.ts";
import { runRanks } from "./ranks.ts";

/** An even number; on GPUs as many as there are, or any with MIMO_TEST_BACKEND=shm. */
const ranks = Number(process.env.MIMO_TEST_RANKS ?? 4);
/** How rows are expected to move: "peers" where GPUs reach each other. */
const wanted = process.env.MIMO_TEST_ROW_TRANSPORT ?? "host";

test("rows, weights and their gradients are those of the host's exchange, bit for bit", async () => {
	const outcomes = await runRanks("expert-exchange-rank.ts", ranks);
	for (const { stderr, exitCode } of outcomes) expect({ stderr, exitCode }).toEqual({ stderr: "", exitCode: 0 });
	const found = outcomes.map(
		({ stdout }) => JSON.parse(stdout) as { cases: number; overflow: string; transport: string },
	);
	for (const { cases } of found) expect(cases).toBe(120);
	for (const { transport } of found) expect(transport).toBe(wanted);
	// 8 tokens of each rank, 2 rows each, and room for 1.5 times 16.
	const overflows = found.map((_, rank) => (rank === 1 ? `${16 * ranks},24 of 24` : "0,0 of 24"));
	expect(found.map(({ overflow }) => overflow)).toEqual(overflows);
}, 60_000);

test("the room for rows is the bound's, and at most what can come", () => {
	const places = { members: 8, expertTensor: 2, localExperts: 4 };
	expect(balancedRows(100, 6, places)).toBe(1200);
	expect(rowCapacity(100, 6, places, null)).toBe(3200);
	expect(rowCapacity(100, 6, places, 1)).toBe(1200);
	expect(rowCapacity(100, 6, places, 1.001)).toBe(1202);
	expect(rowCapacity(100, 6, places, 5)).toBe(3200);
	expect(rowCapacity(100, 6, { ...places, localExperts: 8 }, null)).toBe(4800);
});
