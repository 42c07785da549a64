/** `mimo bench`: steps of a model, their losses, and a row of the board. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { compareLosses } from "../../src/commands/bench/models.ts";
import { loadText } from "../../src/commands/bench.ts";
import { mimo } from "./mimo.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-bench-test-"));
afterAll(() => rmSync(folder, { recursive: true }));

const bench = (flags: string) => mimo(["bench", ...flags.split(" ")], folder);

test("steps of the laptop's model have the stored losses, and a row goes to the board", () => {
	for (const ranks of [1, 2]) {
		const { exitCode, stdout } = bench(
			`--model laptop --gpus ${ranks} --steps 4 --record board.md --log run${ranks}.jsonl`,
		);
		expect(exitCode).toBe(0);
		expect(stdout).toMatch(
			/^laptop on .+: a step takes [\d.]+ \([\d.]+\) ms, median \(least\) of 2: [\d.]+ [GT]FLOP\/s a process/m,
		);
		expect(stdout).toContain("Losses of 4 steps are the trail's within 0.0001.");
	}
	const board = readFileSync(join(folder, "board.md"), "utf8").split("\n");
	const rows = board.filter((line) => line.startsWith("|"));
	expect(rows).toHaveLength(4);
	for (const row of rows.slice(2))
		expect(row).toMatch(/^\| \d{4}-\d\d-\d\d \| \w+ \| .+ \| laptop \| [\d.]+ \([\d.]+\) \| .+ \|$/);
	expect(rows[3]).toContain("| 2 × ");
}, 120_000);

test("another run's losses are a trail, and a loss that is off is named with its step", () => {
	const log = readFileSync(join(folder, "run1.jsonl"), "utf8");
	expect(bench("--model laptop --steps 3 --trail run1.jsonl").exitCode).toBe(0);
	writeFileSync(join(folder, "off.jsonl"), log.replace('"lm loss":7.49', '"lm loss":7.45'));
	const { exitCode, stderr } = bench("--model laptop --steps 3 --trail off.jsonl --record off.md");
	expect(exitCode).toBe(1);
	expect(stderr).toMatch(
		/^mimo: Step 2 has loss 7\.49\d+, where the stored trail has 7\.45\d+: \S+ apart, allowed is 0\.0001\./m,
	);
	expect(readFileSync(join(folder, "board.md"), "utf8")).not.toContain("off");
}, 120_000);

test("a mistake is one sentence", () => {
	writeFileSync(join(folder, "other.md"), "# Notes\n");
	for (const [flags, sentence] of [
		["--model desk", '--model is "desk"; allowed is'],
		["--gpus 0 --model laptop", "--gpus is 0; allowed is an integer from 1."],
		["--steps 2 --model laptop", "--steps is 2; allowed is an integer from 3."],
		[
			"--model laptop --precision e4m3",
			"--precision e4m3 is for models that step on GPUs; --model laptop runs in fp32.",
		],
		["--model laptop --precision fp4", '--precision is "fp4"; allowed is bf16, e4m3'],
		["--model laptop --trail absent.jsonl", "absent.jsonl"],
		["--model laptop --trail other.md", "other.md is no JSON log of a training."],
		["--model nemotron-nano --gpus 4000", "--gpus is 4000, and this machine has "],
	] as const) {
		const { exitCode, stderr } = bench(flags);
		expect(exitCode).not.toBe(0);
		expect(stderr.trim().split("\n")).toHaveLength(1);
		expect(stderr).toContain(sentence);
	}
	const { stderr } = bench("--model laptop --steps 3 --record other.md");
	expect(stderr).toContain('other.md has no heading "## Steps by `mimo bench`", below which rows are written.');
}, 60_000);

test("clocks and power are medians of the samples under load", () => {
	expect(loadText("210, 80.1\n1500, 690.5\n1400, 695.5\n1410, 700\n[N/A], [N/A]\n210, 90\n")).toBe("1410 MHz, 696 W");
	expect(loadText("")).toBe(null);
});

test("losses are compared as far as both go", () => {
	expect(compareLosses([1, 2, 3], [1, 2], 0)).toBe(2);
	expect(() => compareLosses([1, 2.1], [1, 2, 3], 0.01)).toThrow("Step 2 has loss 2.1");
});
