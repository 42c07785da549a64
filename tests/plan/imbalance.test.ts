/** The imbalance that a log shows, by the ranks that the experts would lie on. */
import { expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { measuredImbalance } from "../../src/commands/plan.ts";

test("the busiest rank of the worst step, a mean over layers", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-imbalance-"));
	try {
		const log = join(folder, "log.jsonl");
		const step = (layers: Record<string, number[]>) => JSON.stringify({ iteration: 1, tokens_per_expert: layers });
		writeFileSync(
			log,
			`${[
				'{"event":"start"}',
				step({ 1: [10, 10, 10, 10], 5: [10, 10, 10, 10] }),
				step({ 1: [30, 0, 5, 5], 5: [10, 10, 0, 20] }),
				"torn",
			].join("\n")}\n`,
		);
		// Experts 0 and 1 on one rank: 30 and 20 of 20 rows, 1.5 and 1.
		expect(measuredImbalance(log, 2)).toBe(1.25);
		// An expert a rank: the first has 30 and 10 of 10.
		expect(measuredImbalance(log, 1)).toBe(2);
		expect(measuredImbalance(log, 4)).toBe(1);
		writeFileSync(log, '{"iteration":1}\n');
		expect(() => measuredImbalance(log, 1)).toThrow("has no tokens_per_expert");
	} finally {
		rmSync(folder, { recursive: true });
	}
});
