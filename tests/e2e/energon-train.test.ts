/** Training from Energon data: the same losses whatever the grids and however encoder ranks read their lanes. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
beforeAll(() => {
	captions(scratch, "one", [17, 9, 12], "2,1,0");
	captions(scratch, "two", [8, 13]);
	const items = "      - path: one\n        weight: 2\n      - path: two\n        weight: 1\n";
	const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n";
	scratch.file("blend.yaml", head + items);
});

const common = [
	...["--preset", "nemotron-vlm-tiny", "--data-path", "blend.yaml", "--seq-length", "64", "--train-iters", "2"],
	...["--micro-batch-size", "2", "--global-batch-size", "8", "--lr-warmup-iters", "1", "--log-interval", "1"],
	...["--packing-buffer-size", "6", "--shuffle-buffer-size", "4", "--data-end-id", "10", "--data-threads", "1"],
	...["--hidden-size", "32", "--mamba-num-heads", "2", "--vision-hidden-size", "32", "--threads", "1"],
	...deviceFlags.split(" "),
];

/** Losses of the steps, as they are logged. */
function losses(name: string, ...flags: string[]): number[] {
	const { exitCode, stderr } = mimo(["train", ...common, "--log-json", `${name}.jsonl`, ...flags], scratch.path);
	expect([name, exitCode, exitCode === 0 ? "" : stderr]).toEqual([name, 0, ""]);
	const lines = readFileSync(join(scratch.path, `${name}.jsonl`), "utf8")
		.trim()
		.split("\n");
	return lines.flatMap((line) => {
		const { "lm loss": loss } = JSON.parse(line) as Record<string, number>;
		return loss === undefined ? [] : [loss];
	});
}

describe("the loss trail", () => {
	let reference: number[];
	beforeAll(() => {
		reference = losses("one-lane", "--num-workers", "4");
		expect(reference).toHaveLength(2);
	});

	const full = process.env.MIMO_TEST_FULL === "1";
	const quick: readonly (readonly [name: string, flags: readonly string[]])[] = [
		["dp2+dp2ep2", ["--encoder-dp", "2", "--llm-dp", "2", "--llm-ep", "2"]],
		["dp4|tp2pp2", ["--encoder-dp", "4", "--llm-offset", "0", "--llm-tp", "2", "--llm-pp", "2", "--num-workers", "4"]],
		["tp2+tp2ep2", ["--encoder-tp", "2", "--llm-tp", "2", "--llm-ep", "2", "--num-workers", "4"]],
	];
	const more: typeof quick = [
		["4+2", ["--encoder-dp", "4", "--llm-dp", "2"]],
		["2+4", ["--encoder-dp", "2", "--llm-dp", "4", "--num-workers", "1"]],
		["dp4|dp2pp2", ["--encoder-dp", "4", "--llm-offset", "0", "--llm-dp", "2", "--llm-pp", "2"]],
		["tp2|dp2ep2", ["--encoder-tp", "2", "--llm-offset", "0", "--llm-dp", "2", "--llm-ep", "2"]],
	];
	for (const [name, flags] of full ? [...quick, ...more] : quick) {
		const routings = name === "dp2+dp2ep2" || full ? ["lane", "routed"] : ["routed"];
		test(`of ${name}, ${routings.join(" and ")}, is that of one lane`, () => {
			const trails = routings.map((routing) => losses(`${name}-${routing}`, "--data-routing", routing, ...flags));
			for (const trail of trails) {
				expect(trail).toEqual(trails[0]!);
				for (const [step, loss] of trail.entries()) expect(Math.abs(loss / reference[step]! - 1)).toBeLessThan(2e-6);
			}
		});
	}
});

test("a resumed run goes on with the samples after the last, on other grids too", () => {
	const steps = (count: number) => ["--train-iters", String(count), "--lr-decay-iters", "8"];
	const save = ["--save", "checkpoints", "--save-interval", "2"];
	const two = ["--encoder-dp", "2", "--llm-dp", "2"];
	const whole = losses("whole", ...two, ...steps(4), ...save);
	const load = ["--load", "checkpoints", "--ckpt-step", "2"];
	expect(losses("resumed", ...two, ...steps(4), ...load)).toEqual(whole.slice(2));
	// One lane with the workers of both.
	const other = losses("other", ...steps(4), ...load, "--num-workers", "4");
	for (const [step, loss] of other.entries()) expect(Math.abs(loss / whole[step + 2]! - 1)).toBeLessThan(2e-6);
	// Shared ranks, and from them back to ranks of their own.
	const shared = ["--encoder-dp", "4", "--llm-offset", "0", "--llm-dp", "2", "--llm-pp", "2"];
	const third = losses("shared", ...shared, ...steps(3), ...load, "--save", "shared", "--save-interval", "3");
	const fourth = losses("parted", ...two, ...steps(4), "--load", "shared");
	for (const [step, loss] of [...third, ...fourth].entries()) {
		expect(Math.abs(loss / whole[step + 2]! - 1)).toBeLessThan(2e-6);
	}
	const refused = mimo(["train", ...common, ...steps(4), ...load], scratch.path);
	expect(refused.exitCode).toBe(1);
	// Before ranks start.
	expect(refused.stderr).toMatch(
		/^mimo: checkpoints\/iter_\d+: The data state was saved with .*; a run of 1 data rank continues it exactly with num-workers 4\.\n$/,
	);
}, 60_000);

test("train-epochs trains as many steps as the passes have, resumed too", () => {
	const begin = common.filter(
		(_, i) =>
			![common.indexOf("--packing-buffer-size"), common.indexOf("--train-iters")].some(
				(at) => i === at || i === at + 1,
			),
	);
	const train = (...flags: string[]) => mimo(["train", ...flags], scratch.path);
	const steps = (output: string) =>
		output.match(/iteration +\d+\/ +\d+/g)?.map((text) => text.replaceAll(/\D+/g, " ").trim());
	// 21 samples, 8 a step.
	const passes = [
		"--data-path",
		"two",
		"--train-epochs",
		"1",
		"--save",
		"passes",
		"--exit-interval",
		"2",
		"--llm-offset",
		"0",
	];
	const first = train(...begin, ...passes);
	expect(first).toMatchObject({ exitCode: 0, stderr: "" });
	expect(first.stdout).toContain("train-epochs 1 of 21 sequences: 3 steps of global-batch-size 8.\n");
	expect(steps(first.stdout)).toEqual(["1 3", "2 3"]);
	const rest = train("--load", "passes");
	expect([rest.exitCode, steps(rest.stdout)]).toEqual([0, ["3 3"]]);
	// Longer, with the learning rate's schedule of the first.
	const longer = train("--load", "passes", "--train-epochs", "1.5", "--override-opt-param-scheduler");
	expect(longer.stdout).toContain("train-epochs 1.5 of 21 sequences: 4 steps");
	expect([longer.exitCode, steps(longer.stdout)]).toEqual([0, ["4 4"]]);
	// By steps from here on.
	const bySteps = train("--load", "passes", "--train-iters", "5", "--override-opt-param-scheduler");
	expect([bySteps.exitCode, steps(bySteps.stdout)]).toEqual([0, ["5 5"]]);
	expect(bySteps.stdout).not.toContain("train-epochs");
	expect(train("--load", "passes", "--train-epochs", "2", "--train-iters", "5")).toMatchObject({
		exitCode: 2,
		stderr: expect.stringContaining("--train-epochs: the value is 2; allowed is one of"),
	});
	expect(mimo(["plan", ...begin, "--train-epochs", "2", "--data-path", "elsewhere"], scratch.path).exitCode).toBe(0);
}, 60_000);

test("evaluation reads the validation part; text alone trains a language model", () => {
	const flags = ["--data-path", "one", "--eval-iters", "1", "--eval-interval", "1"];
	expect(losses("evaluated", ...flags).length).toBe(4);
	// Before a step is taken, not when the first evaluation comes.
	const few = mimo(
		["train", ...common, ...flags, "--eval-micro-batch-size", "50", "--eval-global-batch-size", "50"],
		scratch.path,
	);
	expect([few.exitCode, few.stdout, few.stderr]).toEqual([
		1,
		"",
		expect.stringMatching(
			/^mimo: The part val of one has \d+ samples, and an evaluation needs 50: eval-micro-batch-size \(50\) for each of 1 data lane\.\n$/,
		),
	]);
	const records = Array.from({ length: 40 }, (_, i) => JSON.stringify({ text: `record ${i} ${"x".repeat(i)}` }));
	scratch.file("facts.jsonl", `${records.join("\n")}\n`);
	expect(mimo(["data", "prepare", "facts.jsonl"], scratch.path).exitCode).toBe(0);
	expect(losses("text", "--llm-only", "--data-path", "facts.jsonl")).toHaveLength(2);
});

test("a damaged sample is left out, said and listed", () => {
	const folder = captions(scratch, "damaged", [6]);
	const shard = join(folder, "damaged-000.tar");
	const bytes = readFileSync(shard);
	bytes.fill(0xee, bytes.indexOf("IDAT") + 4, bytes.indexOf("IDAT") + 20);
	writeFileSync(shard, bytes);
	const flags = ["--data-path", "damaged", "--data-skipped-file", "skipped.jsonl", "--log-json", "damaged.jsonl"];
	// Both ranks decode the images of both lanes, one tells of them.
	const shared = ["--encoder-tp", "2", "--llm-offset", "0", "--llm-dp", "2", "--llm-ep", "2"];
	const { exitCode, stderr, stdout } = mimo(["train", ...common, ...flags, ...shared], scratch.path);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(stdout.match(/^1 sample is left out: .*damaged000000: the image is damaged.*$/gm)).toHaveLength(1);
	const [first] = readFileSync(join(scratch.path, "skipped.jsonl"), "utf8").split("\n");
	expect(JSON.parse(first!).samples).toEqual([{ dataset: "damaged", shard: "damaged-000.tar", key: "damaged000000" }]);
	const events = readFileSync(join(scratch.path, "damaged.jsonl"), "utf8").match(/\{"event":"data".*\}/g);
	// The set is small, and the sample is read again and again.
	expect(events).toHaveLength(1);
	expect(events![0]).toContain('"sentence":"1 sample is left out: ');
	// Encoder ranks alone decode, two of them the images of one lane, or four its microbatches in turn: language ranks hear
	// of the damage, and it counts once.
	const trails = [
		["--llm-offset", "0", "--num-workers", "4"],
		["--encoder-dp", "4", "--llm-dp", "2"],
		["--encoder-dp", "4", "--llm-offset", "0", "--llm-tp", "2", "--llm-pp", "2", "--num-workers", "4"],
	].map((grids, i) => losses(`damaged${i}`, "--data-path", "damaged", ...grids));
	expect(trails[0]).toHaveLength(2);
	for (const trail of trails.slice(1)) {
		for (const [step, loss] of trail.entries()) expect(Math.abs(loss / trails[0]![step]! - 1)).toBeLessThan(2e-6);
	}
	const said = trails.map((_, i) => {
		const log = readFileSync(join(scratch.path, `damaged${i}.jsonl`), "utf8");
		return [...log.matchAll(/"sentence":"(\d+ samples? (?:is|are) left out)/g)].map((match) => match[1]);
	});
	expect(said).toEqual(trails.map(() => ["1 sample is left out"]));
	const strict = mimo(["train", ...common, "--data-path", "damaged", "--data-on-error", "raise"], scratch.path);
	expect([strict.exitCode, strict.stderr.includes("damaged000000")]).toEqual([1, true]);
}, 60_000);

test("samples left out on several ranks are one line with their number", () => {
	const folder = captions(scratch, "several", [6, 6]);
	for (const name of ["several-000.tar", "several-001.tar"]) {
		const bytes = readFileSync(join(folder, name));
		for (let at = bytes.indexOf("IDAT"), left = 2; left > 0; left--, at = bytes.indexOf("IDAT", at + 20)) {
			bytes.fill(0xee, at + 4, at + 20);
		}
		writeFileSync(join(folder, name), bytes);
	}
	const flags = ["--data-path", "several", "--log-json", "several.jsonl", "--encoder-dp", "2", "--llm-dp", "2"];
	const { exitCode, stdout } = mimo(["train", ...common, ...flags, "--train-iters", "4"], scratch.path);
	expect(exitCode).toBe(0);
	const lines = stdout.match(/^\d+ samples? (is|are) left out.*$/gm)!;
	expect(lines.length).toBeLessThanOrEqual(2);
	expect(lines.at(-1)).toMatch(/^4 samples are left out, the last: Sample \S+: the image is damaged/);
}, 30_000);

test("a language model alone refuses images, a set that is not prepared is refused", () => {
	const run = (...flags: string[]) => mimo(["train", ...common, ...flags], scratch.path);
	const images = run("--llm-only");
	expect(images.exitCode).toBe(1);
	expect(images.stderr).toContain("has images, but the model has no encoder");
	const absent = run("--data-path", "nowhere.yaml");
	expect(absent.exitCode).toBe(1);
	expect(absent.stderr).toContain("nowhere.yaml does not exist");
});
