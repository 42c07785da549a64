/** `mimo report`: one run, the latest of its log unless all are asked for. */
import { expect, test } from "bun:test";
import { appendFileSync } from "node:fs";
import { join } from "node:path";
import { Scratch } from "../data/fixtures.ts";
import { mimo } from "./mimo.ts";

test("the latest run is drawn, two logs are compared, and a missing log is named", () => {
	using scratch = new Scratch();
	const file = join(scratch.path, "log.jsonl");
	for (const steps of [3, 2]) {
		const iterations = Array.from({ length: steps }, (_, i) => ({ iteration: i + 1, "lm loss": 5, elapsed_ms: 1 }));
		for (const record of [{ event: "start", step: 0, sentence: "" }, ...iterations]) {
			appendFileSync(file, `${JSON.stringify({ ...record, time: new Date(steps).toISOString() })}\n`);
		}
	}
	const report = (...more: string[]) => mimo(["report", "log.jsonl", ...more], scratch.path);
	const latest = report();
	expect([latest.exitCode, latest.stderr]).toEqual([0, ""]);
	expect(latest.stdout).toMatch(
		/^log\.html: 2 steps, \d+ KiB\.\nAn earlier run of log\.jsonl is left out; --all-runs /,
	);
	expect(report("--all-runs").stdout).toMatch(/^log\.html: 5 steps, \d+ KiB\.\n$/);
	const two = report("log.jsonl", "--output", "two.html");
	expect([two.exitCode, two.stderr]).toEqual([0, ""]);
	expect(two.stdout).toMatch(/^two\.html: 2 steps and 2 steps, \d+ KiB\.\n/);
	const absent = report("other.jsonl");
	expect([absent.exitCode, absent.stderr]).toEqual([
		1,
		"mimo: other.jsonl: there is no such log file or run folder.\n",
	]);
});
