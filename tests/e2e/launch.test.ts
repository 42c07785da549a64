/** dist/mimo train on several ranks of this host: it launches itself, and says why when a rank ends. */
import { afterAll, afterEach, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { executable, mimo } from "../commands/mimo.ts";
import { Launched, survivors } from "../launch/launched.ts";
import { loggedSteps } from "./small-run.ts";

const book = join(import.meta.dir, "../../examples/text/king-james.txt");
const small = ["--preset", "nemotron-tiny", "--data-path", book, "--split", "100,0,0", "--lr-warmup-iters", "1"];

let started: Launched | null = null;
function train(args: readonly string[]): Launched {
	started = Launched.run([executable, "train", ...small, ...args]);
	return started;
}
afterEach(async () => {
	const pids = started?.pids ?? [];
	started?.process.kill("SIGKILL");
	expect(await survivors(pids)).toEqual([]);
});

test("starts as many ranks as the grids need, and only the last one reports", async () => {
	const ended = await train(["--llm-tp", "2", "--llm-dp", "2", "--train-iters", "2", "--log-interval", "1"]).end();
	expect(ended).toMatchObject({ exitCode: 0, stderr: "" });
	expect(ended.stdout.match(/^rank \d: pid \d+ \(language, tp \d dp \d\)$/gm)).toHaveLength(4);
	expect(ended.stdout.match(/ iteration +\d\/ +2 \|/g)).toHaveLength(2);
	expect(ended.stdout).not.toContain("[rank ");
}, 120_000);

test("another --nproc is refused with the sizes of the grids", async () => {
	const ended = await train(["--llm-tp", "2", "--nproc", "3", "--train-iters", "2"]).end();
	expect(ended).toMatchObject({
		exitCode: 2,
		stdout: "",
		stderr: "mimo: --nproc 3: the configured grids need 2 ranks (language 2).\n",
	});
}, 120_000);

test("a killed rank ends the training with its name, place and step", async () => {
	const launched = train(["--llm-tp", "2", "--nproc", "2", "--train-iters", "2000", "--log-interval", "1"]);
	await launched.said(/ iteration +3\//);
	// Rank 1 reaches its next collective while rank 0 is stopped; a rank that computes at the kill is said to be busy.
	launched.signal(launched.pids[0]!, "SIGSTOP");
	await Bun.sleep(500);
	launched.signal(launched.pids[0]!, "SIGKILL");
	const ended = await launched.end();
	expect(ended.stderr).toMatch(
		/^mimo: rank 0 \(language, tp 0 dp 0; host \S+, process \d+\) failed: it was killed by SIGKILL \(after step \d+, /,
	);
	expect(ended.stderr).toMatch(
		/^ {2}rank 1 \(language, tp 1 dp 0; .* waited in language\.\w+ \w+ \d+ \(\d+ bytes\) for rank 0\.$/m,
	);
	expect(ended.exitCode).toBe(1);
	expect(ended.seconds).toBeLessThan(10);
}, 120_000);

const interrupted = (kept: string) =>
	`mimo: Interrupted: the run stops after this step${kept}; Ctrl-C again ends it at once.\n`;

test("SIGINT stops all ranks after the same step, also where terminal, parent and launcher each pass it on", async () => {
	const flags = ["--llm-dp", "2", "--nproc", "2", "--train-iters", "2000", "--log-interval", "1"];
	const launched = train(flags);
	await launched.said(/ iteration +2\//);
	for (const pid of [launched.process.pid, ...launched.pids]) process.kill(pid, "SIGINT");
	await Bun.sleep(20);
	launched.process.kill("SIGINT");
	const ended = await launched.end();
	expect(ended.stdout).toMatch(/^Interrupted: stopped after step \d+, without a checkpoint\.$/m);
	expect(ended.stdout).toMatch(/^Trained \d+ steps in /m);
	expect([ended.exitCode, ended.stderr]).toEqual([130, interrupted(", without a checkpoint")]);
}, 120_000);

/** A step of some ten seconds on a free core. */
const longStep = ["--train-iters", "2", "--global-batch-size", "512"];

/** Trains, and sends two SIGINTs that are not one key press in the middle of the first step. */
async function interruptTwice(flags: readonly string[]) {
	const launched = train(flags);
	await launched.said(/Training 1\.\d+ M parameters/);
	await Bun.sleep(1500);
	launched.process.kill("SIGINT");
	await launched.said(/Interrupted/);
	await Bun.sleep(600);
	launched.signal(launched.process.pid, "SIGINT");
	return await launched.end();
}

test("a second SIGINT ends a process at once, in the middle of a step", async () => {
	const ended = await interruptTwice(longStep);
	expect(ended).toMatchObject({ signal: "SIGINT", stderr: interrupted(", without a checkpoint") });
	expect(ended.seconds).toBeLessThan(3);
}, 120_000);

test("a second SIGINT ends all ranks at once, in the middle of a step", async () => {
	const ended = await interruptTwice([...longStep, "--llm-dp", "2"]);
	const stderr = `${interrupted(", without a checkpoint")}mimo: The run was interrupted by SIGINT.\n`;
	expect(ended).toMatchObject({ exitCode: 130, stderr });
	expect(ended.seconds).toBeLessThan(5);
}, 120_000);

for (const [what, flags, lines] of [
	["one process", [], 2],
	["ranks, while they start", ["--llm-dp", "2"], 1],
	["ranks, in training", ["--llm-dp", "2"], 4],
] as const) {
	test(`a reader that leaves early ends it without a word: ${what}`, async () => {
		const words = [executable, "train", ...small, ...flags, "--train-iters", "100000", "--log-interval", "1"];
		const script = `{ "$@"; echo "ended with $?" >&2; } | head -n ${lines}`;
		const launched = Launched.run(["sh", "-c", script, "sh", ...words]);
		started = launched;
		const { stdout, stderr } = await launched.end();
		expect(stdout.trimEnd().split("\n")).toHaveLength(lines);
		expect(stderr).toBe("ended with 141\n");
	}, 60_000);
}

test("every step's parts add up to it, for each module", async () => {
	const log = join(mkdtempSync(join(tmpdir(), "mimo-parts-")), "log.jsonl");
	const config = join(import.meta.dir, "../../examples/vlm-tiny.yaml");
	const mock = ["--dataset-provider", "mock", "--eval-captions", "0"];
	const flags = ["--config", config, ...mock, "--device", "cpu", "--train-iters", "3", "--lr-warmup-iters", "1"];
	const { exitCode, stderr } = mimo(["train", ...flags, "--log-interval", "1", "--log-json", log]);
	expect([exitCode, stderr]).toEqual([0, ""]);
	interface Part {
		readonly [field: string]: number | string;
	}
	const steps = loggedSteps(log) as { elapsed_ms: number; modules: Part[]; memory: object[] }[];
	const wholes = new Map<string, number>();
	for (const { elapsed_ms, modules, memory } of steps) {
		expect(modules.map(({ name }) => name)).toEqual(["radio_encoder", "language"]);
		expect(memory).toHaveLength(4);
		for (const module of modules) {
			const parts = Object.entries(module).filter(([field]) => /^(?!slowest).*_ms$/.test(field));
			const sum = parts.reduce((total, [, value]) => total + (value as number), 0);
			const name = String(module.name);
			wholes.set(name, (wholes.get(name) ?? 0) + sum);
			// The ranks' clocks start and stop at different moments of one step, those of the encoder where it is done: it may
			// be well into the next one by then.
			if (name === "language") expect(Math.abs(sum / elapsed_ms - 1)).toBeLessThan(0.6);
			expect(module.compute_ms).toBeGreaterThan(0);
			expect(module.tflops_per_rank).toBeGreaterThan(0);
			expect(module.idle).toBeWithin(0, 1);
		}
	}
	const elapsed = steps.reduce((total, { elapsed_ms }) => total + elapsed_ms, 0);
	for (const whole of wholes.values()) expect(Math.abs(whole / elapsed - 1)).toBeLessThan(0.6);
	const line = readFileSync(log, "utf8").split("\n")[0]!;
	expect(JSON.parse(line)).toMatchObject({ event: "start", step: 0, train_iterations: 3, world_size: 4 });
	rmSync(dirname(log), { recursive: true });
}, 60_000);

describe("what a run leaves for mimo diagnose", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-flight-"));
	afterAll(() => rmSync(folder, { recursive: true }));
	const flags = (name: string) => [
		...["--llm-dp", "2", "--nproc", "2", "--train-iters", "2000", "--log-interval", "1"],
		...["--flight-recorder-dir", join(folder, name)],
	];

	test("the printed diagnosis, word by word", async () => {
		const launched = train(flags("failed"));
		await launched.said(/ iteration +3\//);
		launched.signal(launched.pids[0]!, "SIGKILL");
		const ended = await launched.end();
		const { exitCode, stdout } = mimo(["diagnose", join(folder, "failed")]);
		expect([exitCode, `mimo: ${stdout}`]).toEqual([0, ended.stderr]);
		// A line that was cut hides no other lines.
		const cut = join(folder, "failed", "rank-0.flight");
		truncateSync(cut, 1000);
		expect(mimo(["diagnose", join(folder, "failed")])).toEqual({
			exitCode: 0,
			stdout,
			stderr: `${cut} is no recording of a rank by this version. It is left out.\n`,
		});
		rmSync(join(folder, "failed", "rank-1.flight"));
		expect(mimo(["diagnose", join(folder, "failed")])).toMatchObject({
			exitCode: 1,
			stderr: `mimo: ${cut} is no recording of a rank by this version.\n`,
		});
	}, 120_000);

	test("what the launcher alone knew", async () => {
		const launched = train(flags("interrupted"));
		await launched.said(/ iteration +3\//);
		launched.signal(launched.process.pid, "SIGTERM");
		expect(await launched.end()).toMatchObject({
			exitCode: 143,
			stderr: "mimo: The run was interrupted by SIGTERM.\n",
		});
		const { exitCode, stdout } = mimo(["diagnose", join(folder, "interrupted")]);
		expect([exitCode, stdout]).toEqual([
			0,
			expect.stringMatching(/^The run failed: interrupted by SIGTERM\.\n {2}rank 0 /),
		]);
	}, 120_000);

	test("of a run whose launcher was killed: where every rank was", async () => {
		const launched = train(flags("killed"));
		await launched.said(/ iteration +3\//);
		await Bun.sleep(500);
		launched.process.kill("SIGKILL");
		await launched.end();
		const { exitCode, stdout } = mimo(["diagnose", join(folder, "killed")]);
		expect(exitCode).toBe(0);
		const [first, ...ranks] = stdout.trim().split("\n");
		expect(first).toMatch(/^The run failed: all ranks ended at once without an error, as when their launcher /);
		expect(ranks).toHaveLength(2);
		for (const [rank, line] of ranks.entries()) {
			expect(line).toMatch(new RegExp(`^  rank ${rank} \\(language, .*\\) (waited in|was busy, )`));
		}
		rmSync(join(folder, "killed", "rank-1.flight"));
		const [blamed, other] = mimo(["diagnose", join(folder, "killed")])
			.stdout.trim()
			.split("\n");
		expect(blamed).toMatch(
			/^rank 0 .* failed: it ended without an error; 1 of 2 ranks have left no recording, as ranks that/,
		);
		expect(other).toBe("  rank 1 has left no recording.");
	}, 120_000);

	test("is nothing where it ended well", async () => {
		const short = flags("well").map((flag) => (flag === "2000" ? "2" : flag));
		expect((await train(short).end()).exitCode).toBe(0);
		const { exitCode, stderr } = mimo(["diagnose", join(folder, "well")]);
		expect([exitCode, stderr]).toEqual([1, expect.stringContaining("holds no recordings")]);
		writeFileSync(join(folder, "well", "rank-0.flight"), "no recording");
		expect(mimo(["diagnose", join(folder, "well")]).stderr).toContain("rank-0.flight is no recording of a rank");
	}, 120_000);
});
