/** A training whose records are removed under it trains to its end, and says so with its exit code. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, mkdirSync, rmSync } from "node:fs";
import { executable } from "../commands/mimo.ts";
import { SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

const steps = 40;
const flags = [
	..."--preset nemotron-tiny --hidden-size 64 --seq-length 32 --lr-warmup-iters 1 --device cpu --threads 1".split(" "),
	...`--train-iters ${steps} --log-interval 1 --data-path text.txt --save-hf weights`.split(" "),
	...`--tensorboard-dir tb --profile-step-start 2 --profile-step-end ${steps} --profile-file traces/trace.json`.split(
		" ",
	),
];

test("events and a trace whose folders are removed", async () => {
	mkdirSync(run.path("traces"));
	const training = Bun.spawn([executable, "train", ...flags, "--llm-dp", "2"], {
		cwd: run.folder,
		stdout: "pipe",
		stderr: "pipe",
	});
	let printed = "";
	const decoder = new TextDecoder();
	for await (const bytes of training.stdout) {
		printed += decoder.decode(bytes);
		if (!/ iteration +1\//.test(printed)) continue;
		for (const name of ["tb", "traces"]) rmSync(run.path(name), { recursive: true, force: true });
	}
	const stderr = await new Response(training.stderr).text();
	expect(printed).toContain(`Trained ${steps} steps`);
	expect(existsSync(run.path("weights/config.json"))).toBe(true);
	expect(stderr.split("\n")).toEqual([
		expect.stringMatching(/^The event file tb\/\S+ cannot be written: it was removed\. Training continues\.$/),
		"The trace traces/trace.json.rank-0 cannot be written: it does not exist. Training continues.",
		expect.stringMatching(
			/^The TensorBoard record in tb is incomplete: \d+ entries could not be written, the first after step \d+\.$/,
		),
		`The trace traces/trace.json is incomplete: 1 entry could not be written, the first after step ${steps}.`,
		"",
	]);
	expect(await training.exited).toBe(1);
}, 120_000);
