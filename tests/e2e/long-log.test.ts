/** A log of many steps: the run that goes on with it, and its report, take no more memory than 300 MB. */
import { expect, test } from "bun:test";
import { appendFileSync } from "node:fs";
import { executable } from "../commands/mimo.ts";
import { loggedSteps, SmallRun } from "./small-run.ts";

const lines = process.env.MIMO_TEST_FULL === "1" ? 1_000_000 : 20_000;
const chunk = 5_000;
const most = 300e6;

test(`${lines} steps in a log`, () => {
	using run = new SmallRun();
	/** Runs the program; it ends well, within the memory. Returns its output. */
	const within = (...args: string[]): string => {
		const child = Bun.spawnSync([executable, ...args], { cwd: run.folder, stdout: "pipe", stderr: "pipe" });
		expect([child.exitCode, child.stderr.toString()]).toEqual([0, ""]);
		expect(child.resourceUsage.maxRSS).toBeGreaterThan(10e6);
		expect(child.resourceUsage.maxRSS).toBeLessThan(most);
		return child.stdout.toString();
	};
	const flags =
		"--preset nemotron-tiny --hidden-size 64 --seq-length 64 --lr-warmup-iters 1 --device cpu --data-path text.txt --train-iters 4 --log-json log.jsonl --save saved --save-interval 2";
	run.train(flags.split(" ").concat("--exit-interval", "2"));
	const [, second] = loggedSteps(run.path("log.jsonl"));
	expect(second!.iteration).toBe(2);
	for (let first = 0; first < lines; first += chunk) {
		const steps = Array.from({ length: chunk }, (_, i) => JSON.stringify({ ...second, iteration: 3 + first + i }));
		appendFileSync(run.path("log.jsonl"), `${steps.join("\n")}\n`);
	}
	const resumed = within("train", ...flags.split(" "), "--load", "saved");
	expect(resumed).toContain("going on after step 2.");
	// Of the steps behind the checkpoint, which the resumed run began anew, it did two.
	expect(within("report", "log.jsonl", "--output", "report.html")).toContain(": 4 steps");
}, 600_000);
