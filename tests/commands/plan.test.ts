import { afterEach, expect, setDefaultTimeout, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { loggedSteps } from "../e2e/small-run.ts";
import { mimo } from "./mimo.ts";

setDefaultTimeout(30_000);

const folders: string[] = [];
afterEach(() => {
	for (const folder of folders.splice(0)) rmSync(folder, { recursive: true });
});

test("tables of memory, operations, traffic and time", () => {
	const { stdout, exitCode } = mimo(["plan", "--config", "examples/vlm-tiny.yaml", "--gpu", "h200"]);
	expect(exitCode).toBe(0);
	for (const title of [
		"Memory of a rank",
		"Floating-point operations",
		"Bytes that a rank sends",
		"Seconds of a step",
	]) {
		expect(stdout).toContain(`# ${title}`);
	}
	expect(stdout).toMatch(/radio_encoder +0-1 /);
	expect(stdout).toMatch(/language +2-3 /);
	expect(stdout).toContain("layers recomputed");
});

test("rates are measured, kept and read again", async () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-plan-"));
	folders.push(folder);
	const file = join(folder, "rates.json");
	const flags = ["plan", "--preset", "nemotron-tiny", "--rates", file, "--json"];
	const measured = mimo([...flags, "--measure", "--device", "cpu", "--threads", "1"]);
	expect(measured.stderr).toBe("");
	const read = mimo(flags);
	const [first, second] = [JSON.parse(measured.stdout), JSON.parse(read.stdout)];
	expect(second.step.seconds).toBe(first.step.seconds);
	expect(second.modules[0].memory.peak).toBe(first.modules[0].memory.peak);
	expect((await Bun.file(file).json()).operations.gemm.length).toBeGreaterThan(1);
}, 60_000);

test("routing that is forced to balance is even", () => {
	const flags = [
		"plan",
		"--preset",
		"nemotron-tiny",
		"--llm-dp",
		"2",
		"--llm-ep",
		"2",
		"--moe-router-force-load-balancing",
	];
	expect(mimo([...flags, "--expert-imbalance", "1"]).exitCode).toBe(0);
	const { stderr, exitCode } = mimo([...flags, "--expert-imbalance", "1.5"]);
	expect(exitCode).toBe(2);
	expect(stderr).toContain("--expert-imbalance 1.5: allowed is 1 with moe-router-force-load-balancing");
});

test("every rank's peak of a real run on disjoint grids is within 5 % of the plan", async () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-plan-"));
	folders.push(folder);
	const log = join(folder, "log.jsonl");
	const layout = "--preset nemotron-vlm-tiny --device cpu --encoder-tp 2 --llm-dp 2 --llm-ep 2";
	const flags = [...layout.split(" "), "--train-iters", "3", "--lr-warmup-iters", "0"];
	expect(mimo(["train", ...flags, "--log-json", log]).exitCode).toBe(0);
	const plan = JSON.parse(mimo(["plan", ...flags, "--json"]).stdout);
	const [, , third] = loggedSteps(log) as { memory: { peak: number }[] }[];
	for (const { firstRank, ranks, memory } of plan.modules) {
		const peaks = third!.memory.slice(firstRank, firstRank + ranks).map(({ peak }) => peak);
		for (const peak of peaks) expect(Math.abs(memory.peak / peak - 1)).toBeLessThan(0.05);
	}
}, 60_000);

test("experts over four ranks: the largest peak is within 5 % of the plan with the log's own imbalance", () => {
	const folder = mkdtempSync(join(tmpdir(), "mimo-plan-"));
	folders.push(folder);
	const log = join(folder, "log.jsonl");
	const layout = "--preset nemotron-vlm-tiny --device cpu --llm-tp 2 --llm-dp 2 --llm-ep 4";
	const flags = [...layout.split(" "), "--train-iters", "4", "--lr-warmup-iters", "0"];
	expect(mimo(["train", ...flags, "--log-json", log]).exitCode).toBe(0);
	const { modules } = JSON.parse(mimo(["plan", ...flags, "--json", "--expert-imbalance", log]).stdout);
	const memory = (loggedSteps(log).at(-1) as { memory: { peak: number }[] }).memory;
	const { firstRank, ranks, memory: planned } = modules.at(-1);
	expect([firstRank, ranks]).toEqual([1, 4]);
	const largest = Math.max(...memory.slice(firstRank).map(({ peak }) => peak));
	expect(Math.abs(planned.peak / largest - 1)).toBeLessThan(0.05);
}, 60_000);

test("a plan needs no number of steps", () => {
	const preset = ["plan", "--preset", "nemotron-nano-30b-a3b", "--gpu", "h100", "--json"];
	const { exitCode, stderr, stdout } = mimo(preset);
	expect([exitCode, stderr]).toEqual([0, ""]);
	expect(JSON.parse(stdout)).toBeObject();
	// Nor do the layouts of a text model without one.
	const split = mimo(["plan", "--preset", "nemotron-20l", "--gpu", "h200", "--split", "2", "--memory-gib", "1000"]);
	expect([split.exitCode, split.stderr]).toEqual([0, ""]);
	expect(split.stdout).toMatch(/^\d+ +language alone +2 +\d+ .*--llm-tp/m);
	expect(split.stdout).toContain("language alone, 2 stages of 2 segments");
	expect(split.stdout).toMatch(/^4 segments: --hybrid-layer-pattern '[ME*|]+'$/m);
});

test("a configuration that cannot be planned is refused in a sentence", () => {
	const missing = mimo(["plan", "--preset", "nemotron-tiny", "--rates", "absent.json"]);
	expect([missing.exitCode, missing.stderr]).toEqual([
		1,
		"mimo: --rates absent.json: there is no such file; `mimo plan --measure --rates absent.json` writes it.\n",
	]);
	const gpu = mimo(["plan", "--preset", "nemotron-tiny", "--gpu", "z80"]);
	expect([gpu.exitCode, gpu.stderr]).toEqual([
		2,
		"mimo: There are no rates of a z80; known are a100, h100, h200, b200.\n",
	]);
	const split = mimo(["plan", "--preset", "nemotron-tiny", "--split", "x"]);
	expect([split.exitCode, split.stderr]).toEqual([2, 'mimo: --split is "x"; allowed is an integer from 1.\n']);
	const shares = mimo(["plan", "--preset", "nemotron-tiny", "--split", "100,0,0"]);
	expect([shares.exitCode, shares.stderr]).toEqual([
		2,
		"mimo: --split 100,0,0: here it is the number of devices whose layouts are ranked; shares of the data change no plan.\n",
	]);
	const many = mimo(["plan", "--preset", "nemotron-tiny", "--split", "65537"]);
	expect([many.exitCode, many.stderr]).toEqual([2, "mimo: --split 65537: a run has at most 65536 ranks.\n"]);
});

test("a GPU without products in e4m3 is refused", () => {
	const fp8 = ["--device", "cuda", "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"];
	const planOn = (gpu: string) => mimo(["plan", "--preset", "nemotron-tiny", "--gpu", gpu, ...fp8]);
	expect(planOn("h100").exitCode).toBe(0);
	const { stderr, exitCode } = planOn("a100");
	expect(exitCode).toBe(2);
	expect(stderr).toBe("mimo: --gpu a100: it has no products in e4m3 (fp8-format).\n");
});
