import { expect, test } from "bun:test";
import { runRanks } from "../parallel/ranks.ts";

test("ranks read whole tensors of parts that lie on them in any way, also of more than they exchange at once", async () => {
	const outcomes = await runRanks("../checkpoint/gathered-rank.ts", 3);
	for (const { exitCode, stderr } of outcomes) expect([exitCode, stderr]).toEqual([0, ""]);
	const said = outcomes.map(({ stdout }) => stdout.trim());
	for (const text of said) expect(text).toMatch(/^read \d+$/);
	expect(said.reduce((sum, text) => sum + Number(text.slice("read ".length)), 0)).toBe(9);
}, 60_000);
