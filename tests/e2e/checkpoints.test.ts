/** Checkpoints of `mimo train`: resumed bit by bit, on other layouts, and through other formats. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { CheckpointRuns, type LayoutName, reference } from "./checkpoint-runs.ts";

const runs = new CheckpointRuns();
beforeAll(() => runs.trainWhole(), 120_000);
afterAll(() => runs[Symbol.dispose]());

const full = process.env.MIMO_TEST_FULL === "1";
/** The tolerances of `mimo verify`. */
const tolerance = 1e-5;

describe("resume", () => {
	for (const layout of full ? (["1+1", reference] as const) : ([reference] as const)) {
		test(`${layout}: bitwise the uninterrupted run, stopped by exit-interval`, () => {
			const name = layout.replaceAll(/\W/g, "-");
			const evaluations = "--eval-iters 1 --eval-interval 2";
			if (layout !== reference) runs.trainWell(layout, `--train-iters 4 --log-json ${name}.jsonl ${evaluations}`);
			const log = layout === reference ? "whole.jsonl" : `${name}.jsonl`;
			const common = `--train-iters 4 --save ${name} --load ${name} --save-interval 100 --log-json ${name}-parts.jsonl ${evaluations}`;
			const first = runs.train(layout, `${common} --exit-interval 2`);
			expect([first.exitCode, first.stderr]).toEqual([
				0,
				`${name} (load) holds no checkpoint yet: starting from the beginning.\n`,
			]);
			expect(first.stdout).toContain("Stopped after step 2, a multiple of exit-interval.");
			expect(runs.trainWell(layout, common)).toContain(`Loaded ${name}/iter_0000002: going on after step 2.`);
			expect(runs.steps(`${name}-parts.jsonl`)).toEqual(runs.steps(log));
			expect(readdirSync(runs.path(name)).sort()).toEqual(["iter_0000002", "iter_0000004", "latest.json"]);
			if (layout === reference) expect(runs.digests(name)).toEqual(runs.digests("whole"));
		}, 120_000);
	}

	test("every other layout has the same state, bit by bit, and writes it", () => {
		const expected = runs.digests("whole");
		const more = full ? (["tp2+tp2ep2", "1+dp4ep2"] as const) : [];
		for (const layout of ["colocated", "tp2dp2+tp2, ZeRO-1", ...more] as const) {
			const name = `again-${layout.replaceAll(/\W/g, "-")}`;
			runs.trainWell(layout, `--train-iters 4 --load whole --save ${name} --save-interval 100`);
			expect(runs.digests(name)).toEqual(expected);
		}
	}, 120_000);

	/** 1+4 of one lane: mock data differ between numbers of lanes, as Megatron's do. */
	const heads = "--num-query-groups 4 --mamba-num-groups 4";
	test("saved on tp2+tp2ep2, resumed on other layouts, and back: the state bit by bit, losses within verify's tolerance", () => {
		const home = "tp2+tp2ep2";
		runs.trainWell(home, `${heads} --train-iters 6 --save lanes --save-interval 2 --log-json lanes.jsonl`);
		/** Loads a step's checkpoint on a layout and saves it there without a step. */
		const moved = (layout: LayoutName, from: string, step: number) => {
			const name = `${from}-on-${layout.replaceAll(/\W/g, "-")}`;
			const load = `--load ${from} --ckpt-step ${step} --save ${name} --save-interval 9`;
			runs.trainWell(layout, `${heads} --train-iters ${step} ${load}`);
			return runs.digests(`${name}/iter_000000${step}`);
		};
		/** Loss, gradient norm and balancing loss of every step. */
		const numbers = (log: string) =>
			[...runs.steps(log)].map(([step, values]) => [step, (JSON.parse(values) as number[]).slice(2, 5)] as const);
		const expected = new Map(numbers("lanes.jsonl"));
		for (const layout of ["1+tp4ep4", ...(full ? (["1+1", "tp2dp2+tp2, ZeRO-1"] as const) : [])] as const) {
			const name = `lanes-${layout.replaceAll(/\W/g, "-")}`;
			expect(moved(layout, "lanes", 2)).toEqual(runs.digests("lanes/iter_0000002"));
			const there = `--train-iters 4 --load lanes --ckpt-step 2 --save ${name} --save-interval 9`;
			runs.trainWell(layout, `${heads} ${there} --log-json ${name}.jsonl`);
			expect(moved(home, name, 4)).toEqual(runs.digests(name));
			runs.trainWell(home, `${heads} --train-iters 6 --load ${name} --log-json ${name}.jsonl`);
			const resumed = numbers(`${name}.jsonl`);
			expect(resumed.map(([step]) => step)).toEqual([3, 4, 5, 6]);
			for (const [step, found] of resumed) {
				const errors = found.map((value, i) => Math.abs(value / expected.get(step)![i]! - 1));
				expect({ layout, step, within: Math.max(...errors) < tolerance }).toEqual({ layout, step, within: true });
			}
		}
	}, 180_000);
});

describe("from the folder alone", () => {
	const goOn = (flags: string) => mimo(["train", "--load", "alone", ...flags.split(" ").filter(Boolean)], runs.folder);

	test("the stored configuration goes on, bit by bit, and flags change it and are said", () => {
		runs.trainWell("1+1", "--train-iters 2 --lr-decay-iters 40 --save alone --save-interval 2");
		runs.trainWell("1+1", "--train-iters 4 --lr-decay-iters 40 --save direct --save-interval 4");
		const { exitCode, stdout, stderr } = goOn("--train-iters 4 --llm-offset 0");
		expect([exitCode, stderr]).toEqual([0, ""]);
		expect(stdout).toContain(
			"Changed since checkpoint alone/iter_0000002: flag --train-iters 4 (2 there), flag --llm-offset 0 (1 there).\n",
		);
		expect(stdout).toContain("Saved the checkpoint of step 4 to alone/iter_0000004");
		expect(runs.digests("alone")).toEqual(runs.digests("direct"));
		const again = goOn("");
		expect([again.exitCode, again.stdout]).toEqual([0, expect.stringContaining("going on after step 4.")]);
	}, 60_000);

	test("a run with a preset of its own says what changes the training, and names parts that trained and are frozen", () => {
		runs.trainWell("1+1", "--train-iters 1 --save parts --save-interval 1");
		const flags =
			"--load parts --train-iters 2 --adam-beta2 0.9 --log-interval 2 --use-distributed-optimizer --exit-interval 2";
		expect(runs.trainWell("1+1", `${flags} --llm-tp 2`)).toContain(
			"Changed since checkpoint parts/iter_0000001: flag --adam-beta2 0.9 (0.95 there), flag --train-iters 2 (1 there).\n",
		);
		expect(runs.train("1+1", `${flags} --freeze-vit`).stderr).toMatch(
			/parts\/iter_0000001 was saved by a training of other parts \(.*\): of its optimizer 0 tensors are missing and \d+ too many, such as \S+; --no-load-optim goes on with a new one/,
		);
	}, 60_000);

	test("stored values that equal a key's default win over those of the model's folder", () => {
		const train = (flags: string) => mimo(["train", ...flags.split(" ")], runs.folder);
		const text = `--data-path text.txt --seq-length 32 --lr 1e-3 --train-iters 1 ${deviceFlags}`;
		writeFileSync(runs.path("text.txt"), "A text of few words. ".repeat(1000));
		expect(train(`--preset nemotron-tiny ${text} --save-hf dropping`).exitCode).toBe(0);
		const file = runs.path("dropping/config.json");
		const fields = readFileSync(file, "utf8").replaceAll(/"(hidden|attention)_dropout": [\d.]+/g, '"$1_dropout": 0.5');
		writeFileSync(file, fields);
		const dropouts = (flags: string) => {
			const resolved = JSON.parse(train(`${flags} --print-config --json`).stdout);
			return (["hidden-dropout", "attention-dropout"] as const).map((key) => resolved.configuration[key]);
		};
		expect(dropouts(`--load-hf dropping ${text}`)).toEqual([0.5, 0.5]);
		const first = train(`--load-hf dropping ${text} --hidden-dropout 0 --save undropped`);
		expect(first).toMatchObject({ exitCode: 0, stderr: "" });
		expect(dropouts("--load undropped")).toEqual([0, 0.5]);
		expect(train("--load undropped --train-iters 2 --hidden-dropout 0.1").stdout).toContain(
			"flag --hidden-dropout 0.1 (0 there)",
		);
	}, 60_000);

	test("a folder without a checkpoint is named, not the keys that it would have", () => {
		const { exitCode, stderr } = mimo(["train", "--load", "nowhere", "--train-iters", "2"], runs.folder);
		expect([exitCode, stderr]).toEqual([
			1,
			"mimo: nowhere (load) holds no native or torch_dist checkpoint; a new training needs --config, --preset or --load-hf.\n",
		]);
	});

	test("a longer training keeps the learning rate's schedule", () => {
		const train = (flags: string) => mimo(["train", ...flags.split(" ")], runs.folder);
		const first = `--preset nemotron-tiny --data-path text.txt --seq-length 32 --lr-warmup-iters 0 --train-iters 2 ${deviceFlags}`;
		writeFileSync(runs.path("text.txt"), "A text of few words. ".repeat(1000));
		expect(train(`${first} --save short --save-interval 2`).exitCode).toBe(0);
		expect(train("--load short --train-iters 3")).toMatchObject({
			exitCode: 0,
			stderr: expect.stringMatching(
				/schedule that short\/iter_0000002 began with: it is 0.0003 after step 2 \(--override/,
			),
		});
		expect(train("--load short --train-iters 4 --override-opt-param-scheduler")).toMatchObject({
			exitCode: 0,
			stderr: "",
		});
	}, 60_000);
});

describe("what the checkpoint must agree with", () => {
	beforeAll(() => {
		mkdirSync(runs.path("hf"));
		writeFileSync(runs.path("hf/config.json"), "{}");
	});
	const resume = (more: string) => runs.train("colocated", `--train-iters 6 --load whole ${more}`);
	test.each([
		["--seed 7", "whole/iter_0000004 was trained with seed 1234, this run has 7; --no-load-rng goes on"],
		[
			"--lr 5e-3 --lr-warmup-iters 1 --lr-decay-style linear --lr-decay-iters 9",
			"has another schedule: --lr-decay-style is cosine there and linear here; --lr is 0.002 there and 0.005 here; --lr-warmup-iters is 0 there and 1 here; --lr-decay-iters is 40 there and 9 here; --override-opt-param-",
		],
		["--global-batch-size 16", "was trained with global-batch-size 8, this run has 16"],
		["--num-experts 4", "holds another model: --num-experts is 8 there and 4 here."],
		[
			"--quick-geglu --no-squared-relu --position-embedding-type rope --vision-num-layers 2",
			"holds another model: --squared-relu is true there and false here; --quick-geglu is false there and true here; --position-embedding-type is none there and rope here; --vision-num-layers is 1 there and 2 here.",
		],
		["--load hf", "hf (load) is a hf checkpoint; `mimo convert-ckpt --to native hf TARGET` makes one to resume from."],
		["--ckpt-step 3", "whole has no checkpoint of step 3 (it has iter_0000002, iter_0000004)."],
	])(
		"%s is refused",
		(more, sentence) => {
			const { exitCode, stderr } = resume(more);
			expect(exitCode).toBe(1);
			expect(stderr).toContain(sentence);
		},
		60_000,
	);

	test("weights alone start a new training", () => {
		const output = runs.trainWell(
			"1+1",
			"--train-iters 1 --lr 1e-3 --seed 7 --pretrained-checkpoint whole --log-json fine.jsonl",
		);
		expect(output).toContain("Loaded the weights of whole/iter_0000004.");
		expect([...runs.steps("fine.jsonl").keys()]).toEqual([1]);
		const absent = runs.train("colocated", "--train-iters 1 --pretrained-checkpoint nowhere");
		expect([absent.exitCode, absent.stderr]).toEqual([
			1,
			expect.stringContaining("nowhere (pretrained-checkpoint) holds no native or torch_dist checkpoint"),
		]);
	}, 60_000);
});

test("without the optimizer: saved so, and loaded so", () => {
	const stopped = runs.train(
		"colocated",
		"--train-iters 4 --save bare --save-interval 100 --no-save-optim --exit-duration-in-mins 1e-4",
	);
	expect([stopped.exitCode, stopped.stderr]).toEqual([0, ""]);
	expect(stopped.stdout).toContain("Stopped after step 1: the time of 0.0001 minutes is over.");
	expect(Object.keys(runs.digests("bare")).filter((name) => name.startsWith("optimizer."))).toEqual([]);
	const refused = runs.train("colocated", "--train-iters 4 --load bare");
	expect([refused.exitCode, refused.stderr]).toEqual([
		1,
		expect.stringContaining("was saved without its optimizer; --no-load-optim goes on with a new one."),
	]);
	runs.trainWell("colocated", "--train-iters 3 --load bare --no-load-optim --log-json bare.jsonl");
	const rates = [...runs.steps("bare.jsonl")].map(([step, values]) => [step, JSON.parse(values)[1]]);
	// The schedule begins anew, as Megatron's does.
	expect(rates.map(([step]) => step)).toEqual([2, 3]);
	expect(rates[0]![1]).toBe(2e-3);
}, 60_000);

test("without the schedule, which begins anew", () => {
	runs.trainWell("colocated", "--train-iters 2 --save scheduled --save-interval 2");
	const steps = ["", " --no-load-scheduler"].map((flag) => {
		runs.trainWell("colocated", `--train-iters 4 --load scheduled --log-json next.jsonl${flag}`);
		const [[, first], [, second]] = [...runs.steps("next.jsonl")] as [[number, string], [number, string]];
		rmSync(runs.path("next.jsonl"));
		return [JSON.parse(first), JSON.parse(second)];
	});
	// The same weights and moments; the first of the two learning rates is the schedule's first, so the next losses differ.
	expect(steps[1]![0][3]).toBe(steps[0]![0][3]);
	expect(steps[1]![0][1]).toBe(2e-3);
	expect(steps[0]![0][1]).toBeLessThan(2e-3);
	expect(steps[1]![1][3]).not.toBe(steps[0]![1][3]);
}, 60_000);

test("a Hugging Face folder's config.json and names come back through checkpoints", () => {
	writeFileSync(runs.path("text.txt"), "in the beginning was the word ".repeat(200));
	const tiny = "train --preset nemotron-tiny --hidden-size 64 --seq-length 32 --lr-warmup-iters 0 --lr-decay-iters 9";
	const text = (more: string) => {
		const args = `${tiny} --data-path text.txt --split 100,0,0 ${deviceFlags} --log-interval 5 ${more}`.split(" ");
		const { exitCode, stderr } = mimo(args, runs.folder);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	};
	text("--train-iters 1 --save-hf hf-first");
	const config = join(runs.path("hf-first"), "config.json");
	writeFileSync(config, readFileSync(config, "utf8").replace("{", '{\n  "remark": "kept",'));
	text("--train-iters 1 --load-hf hf-first --save from-hf --save-interval 9");
	text("--train-iters 2 --load from-hf --save from-hf --save-interval 9");
	const converted = mimo(["convert-ckpt", "--to", "hf", "from-hf", "hf-again", "--verify"], runs.folder);
	expect([converted.exitCode, converted.stderr]).toEqual([0, ""]);
	expect(readFileSync(join(runs.path("hf-again"), "config.json"), "utf8")).toBe(readFileSync(config, "utf8"));
}, 60_000);

test("through Megatron's format and back: the same tensors, and the training goes on bit by bit", () => {
	for (const [to, source, target] of [
		["torch_dist", "whole", "megatron"],
		["native", "megatron", "returned"],
	] as const) {
		const { exitCode, stderr } = mimo(["convert-ckpt", "--to", to, source, target, "--verify"], runs.folder);
		expect([exitCode, stderr]).toEqual([0, ""]);
	}
	expect(runs.digests("returned")).toEqual(runs.digests("whole"));
	runs.trainWell("colocated", "--train-iters 6 --load returned --log-json returned.jsonl");
	runs.trainWell("colocated", "--train-iters 6 --load whole --log-json direct.jsonl");
	expect([...runs.steps("returned.jsonl").keys()]).toEqual([5, 6]);
	expect(runs.steps("returned.jsonl")).toEqual(runs.steps("direct.jsonl"));
}, 60_000);
