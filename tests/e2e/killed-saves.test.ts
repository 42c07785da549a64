/**
 * Runs that are killed in every gap of publishing a checkpoint, between two calls that change names in its folder: the same command
 * goes on, and its losses and checkpoints are those of a run that was never killed, bit by bit.
 */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readdirSync, rmSync, writeFileSync } from "node:fs";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { CallWatcher } from "../watch-calls.ts";
import { CheckpointRuns } from "./checkpoint-runs.ts";

const runs = new CheckpointRuns();
afterAll(() => runs[Symbol.dispose]());
let watcher: CallWatcher;
beforeAll(() => {
	watcher = new CallWatcher(runs.folder);
	writeFileSync(runs.path("text.txt"), "the quick brown fox jumps over the lazy dog and runs away. ".repeat(40));
}, 60_000);

/** The first call of a save that counts: ranks report their files; with all gaps the folder of the save is made. */
const from = process.env.MIMO_TEST_FULL ? "mkdir iter_" : "/reports";
const steps = [1, 2, 3, 4];
const folderOf = (step: number) => `iter_000000${step}`;

/** A call of a save, and how many equal ones came before it. */
type Gap = readonly [call: string, earlier: number];

/** The calls of a run's first save, in order. */
function gapsOf(calls: readonly string[]): Gap[] {
	const begin = calls.findIndex((call) => call.includes(from));
	const own = calls.slice(begin, calls.findIndex((call) => call.startsWith("rename latest.json")) + 1);
	return own.map((call, at) => [call, own.slice(0, at).filter((other) => other === call).length]);
}

const model = `train --preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern ME*- --seq-length 32 --dataset-provider text --data-path text.txt --lr-warmup-iters 0 --lr-decay-iters 10 --global-batch-size 2 --micro-batch-size 1 --threads 1 ${deviceFlags}`;
const layout = process.env.MIMO_TEST_FULL ? "--llm-dp 2 --use-distributed-optimizer" : "--llm-dp 1";

describe.each([
	["during which training waits", "waits", ""],
	["beside the training", "beside", " --async-save"],
] as const)("saves %s", (_, name, how) => {
	/** Trains four steps with a save after each, killed before the given call of its first save. */
	function run(suffix: string, gap: Gap | null = null) {
		const folder = `${name}-${suffix}`;
		const flags = `${model} ${layout} --train-iters ${steps.length} --save ${folder} --load ${folder} --save-interval 1 --log-json ${folder}.jsonl${how}`;
		const stop = gap && { action: "kill" as const, from, call: gap[0], nth: gap[1] + 1 };
		const ended = watcher.run(runs.path(folder), stop, [executable, ...flags.split(" ")]);
		const calls = ended.calls.filter((call) => !call.startsWith("open "));
		if (gap !== null) expect([gap, ended.exitCode, ended.stderr]).toEqual([gap, 137, expect.any(String)]);
		return { ...ended, calls };
	}

	/** Runs to the end; what it says and calls, and the checkpoints and losses that it leaves. */
	function finish(suffix: string) {
		const { exitCode, stderr, calls } = run(suffix);
		const folder = `${name}-${suffix}`;
		const names = readdirSync(runs.path(folder)).sort();
		expect([exitCode, stderr, names]).toEqual([0, expect.any(String), [...steps.map(folderOf), "latest.json"]]);
		const checkpoints = steps.map((step) => runs.digests(`${folder}/${folderOf(step)}`));
		return { stderr, calls, result: { checkpoints, losses: runs.steps(`${folder}.jsonl`) } };
	}

	let gaps: Gap[] = [];
	let whole: ReturnType<typeof finish>["result"];
	beforeAll(() => {
		if (!watcher.works) return;
		const finished = finish("whole");
		gaps = gapsOf(finished.calls);
		whole = finished.result;
	}, 60_000);

	test("the first save", () => {
		if (!watcher.works) return;
		expect(gaps.map(([call]) => call).slice(-5)).toEqual([
			"create iter_0000001.tmp-/index.json.tmp-",
			"rename iter_0000001.tmp-/index.json.tmp- iter_0000001.tmp-/index.json",
			"rename iter_0000001.tmp- iter_0000001",
			"create latest.json.tmp-",
			"rename latest.json.tmp- latest.json",
		]);
		const last = gaps.at(-1)!;
		for (const gap of gaps.slice(0, -1)) run("first", gap);
		run("pointer", last);
		for (const suffix of ["first", "pointer"]) {
			const { stderr, result } = finish(suffix);
			const folder = `${name}-${suffix}`;
			expect(stderr).toBe(
				`${folder} has no latest.json, as after a run that was killed during its first save: taking ${folder}/iter_0000001, its newest checkpoint.\n`,
			);
			expect(result).toEqual(whole);
		}
	}, 600_000);

	test("a later save, also one that replaces what a killed save has left", () => {
		if (!watcher.works) return;
		run("later", ["mkdir iter_0000002.tmp-", 0]);
		for (const [call, earlier] of gaps) run("later", [call.replaceAll(folderOf(1), folderOf(2)), earlier]);
		const old = (step: number) => `${folderOf(step)}.tmp--old`;
		run("later", [`rename ${folderOf(2)} ${old(2)}`, 0]);
		run("later", [`rename ${folderOf(2)}.tmp- ${folderOf(2)}`, 0]);
		run("later", ["create latest.json.tmp-", 0]);
		run("later", [`remove ${old(2)}`, 0]);
		run("later", ["rename latest.json.tmp- latest.json", 0]);
		run("later", [`remove ${old(3)}/index.json`, 0]);
		const { stderr, result } = finish("later");
		expect([stderr, result]).toEqual(["", whole]);
	}, 600_000);
});

test("a folder without latest.json is read by every command, which say so", () => {
	const run = (words: string) => mimo(words.split(" "), runs.folder);
	const trained = run(`${model} --train-iters 1 --save text --save-interval 1`);
	expect([trained.exitCode, trained.stderr]).toEqual([0, ""]);
	rmSync(runs.path("text/latest.json"));
	const notice =
		"text has no latest.json, as after a run that was killed during its first save: taking text/iter_0000001, its newest checkpoint.";
	for (const command of [
		`generate --load text --prompt the --max-new-tokens 2 ${deviceFlags}`,
		`evaluate --load text --data text.txt --samples 2 ${deviceFlags}`,
		"convert-ckpt inspect text",
		"convert-ckpt --to torch_dist text converted",
		"convert-ckpt --to hf text model",
		`${model} --train-iters 2 --load text`,
		`${model} --train-iters 1 --pretrained-checkpoint text`,
	]) {
		const { exitCode, stdout, stderr } = run(command);
		const said = `${stdout}${stderr}`.split("\n").filter((line) => line.includes("latest.json"));
		expect([command, exitCode, said]).toEqual([command, 0, [notice]]);
	}
}, 60_000);
