/** Checkpoints of `mimo train`: resume bit by bit, on other layouts, after signals, kills, damage and full disks. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import {
	cpSync,
	existsSync,
	mkdirSync,
	mkdtempSync,
	readdirSync,
	readFileSync,
	rmSync,
	statSync,
	writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { alive, Launched } from "../launch/launched.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-checkpoints-"));
afterAll(() => rmSync(folder, { recursive: true }));
const at = (name: string) => join(folder, name);

const model =
	"--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8";
const recipe = `--lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 0 --lr-decay-iters 40 --adam-eps 1e-6 --log-interval 1 ${deviceFlags}`;
const layouts = {
	colocated: "--llm-offset 0",
	"1+1": "--llm-offset 1",
	"dp2+dp2ep2, ZeRO-1": "--encoder-dp 2 --llm-dp 2 --llm-ep 2 --use-distributed-optimizer",
	"tp2+tp2ep2": "--encoder-tp 2 --llm-tp 2 --llm-ep 2",
	"1+dp4ep2": "--llm-dp 4 --llm-ep 2 --micro-batch-size 1",
	"1+tp4ep4": "--llm-tp 4 --llm-ep 4",
	"tp2dp2+tp2, ZeRO-1": "--encoder-tp 2 --encoder-dp 2 --llm-tp 2 --use-distributed-optimizer",
} as const;
type LayoutName = keyof typeof layouts;

function flags(layout: LayoutName, more: string): string[] {
	return ["train", ...`${model} ${recipe} ${layouts[layout]} ${more}`.split(" ")];
}

function train(layout: LayoutName, more: string) {
	return mimo(flags(layout, more), folder);
}

/** Trains and expects the end that was asked for. */
function trainWell(layout: LayoutName, more: string): string {
	const { exitCode, stdout, stderr } = train(layout, more);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return stdout;
}

/** A log's lines of every step (and evaluation: -step), times aside; a later line of a step must say the same. */
function steps(log: string): Map<number, string> {
	const found = new Map<number, string>();
	for (const line of readFileSync(at(log), "utf8").trim().split("\n")) {
		if (line === "") continue;
		const { iteration, consumed_samples: consumed, learning_rate: rate, grad_norm: norm, ...rest } = JSON.parse(line);
		if (rest.split !== undefined) {
			found.set(-iteration, JSON.stringify(rest["lm loss"]));
			continue;
		}
		if (consumed === undefined) continue;
		const values = JSON.stringify([consumed, rate, norm, rest["lm loss"], rest.seq_load_balancing_loss, rest.tokens]);
		expect([iteration, found.get(iteration) ?? values]).toEqual([iteration, values]);
		found.set(iteration, values);
	}
	return found;
}

/** Digest of every tensor, the optimizer's included. */
function digests(root: string): Record<string, string> {
	using checkpoint = NativeCheckpoint.open(at(root));
	return Object.fromEntries(
		[...checkpoint.tensors.keys()].map((name) => [
			name,
			new Bun.CryptoHasher("sha256").update(readTensor(checkpoint, name) as Float32Array).digest("hex"),
		]),
	);
}

/** The tolerances of `mimo verify`. */
const tolerance = 1e-5;

/** Four steps without interruption on disjoint grids, with checkpoints of steps 2 and 4. */
const reference: LayoutName = "dp2+dp2ep2, ZeRO-1";
beforeAll(() => {
	trainWell(
		reference,
		"--train-iters 4 --save whole --save-interval 2 --async-save --log-json whole.jsonl --eval-iters 1 --eval-interval 2",
	);
}, 120_000);

describe("resume", () => {
	for (const layout of ["1+1", reference] as const) {
		test(`${layout}: bitwise the uninterrupted run, stopped by exit-interval`, () => {
			const name = layout.replaceAll(/\W/g, "-");
			const evaluations = "--eval-iters 1 --eval-interval 2";
			if (layout !== reference) trainWell(layout, `--train-iters 4 --log-json ${name}.jsonl ${evaluations}`);
			const log = layout === reference ? "whole.jsonl" : `${name}.jsonl`;
			const common = `--train-iters 4 --save ${name} --load ${name} --save-interval 100 --log-json ${name}-parts.jsonl ${evaluations}`;
			const first = train(layout, `${common} --exit-interval 2`);
			expect([first.exitCode, first.stderr]).toEqual([
				0,
				`${name} (load) holds no checkpoint yet: starting from the beginning.\n`,
			]);
			expect(first.stdout).toContain("Stopped after step 2, a multiple of exit-interval.");
			expect(trainWell(layout, common)).toContain(`Loaded ${name}/iter_0000002: going on after step 2.`);
			expect(steps(`${name}-parts.jsonl`)).toEqual(steps(log));
			expect(readdirSync(at(name)).sort()).toEqual(["iter_0000002", "iter_0000004", "latest.json"]);
			if (layout === reference) expect(digests(name)).toEqual(digests("whole"));
		}, 120_000);
	}

	test("every other layout has the same state, bit by bit, and writes it", () => {
		const expected = digests("whole");
		for (const layout of ["colocated", "tp2+tp2ep2", "1+dp4ep2", "tp2dp2+tp2, ZeRO-1"] as const) {
			const name = `again-${layout.replaceAll(/\W/g, "-")}`;
			trainWell(layout, `--train-iters 4 --load whole --save ${name} --save-interval 100`);
			expect(digests(name)).toEqual(expected);
		}
	}, 120_000);

	/** 1+4 of one lane: mock data differ between numbers of lanes, as Megatron's do. */
	const heads = "--num-query-groups 4 --mamba-num-groups 4";
	test("saved on tp2+tp2ep2, resumed on 1+1, 1+4 and 4+2, and back: the state bit by bit, losses within verify's tolerance", () => {
		const home = "tp2+tp2ep2";
		trainWell(home, `${heads} --train-iters 6 --save lanes --save-interval 2 --log-json lanes.jsonl`);
		/** Loads a step's checkpoint on a layout and saves it there without a step. */
		const moved = (layout: LayoutName, from: string, step: number) => {
			const name = `${from}-on-${layout.replaceAll(/\W/g, "-")}`;
			const load = `--load ${from} --ckpt-step ${step} --save ${name} --save-interval 9`;
			trainWell(layout, `${heads} --train-iters ${step} ${load}`);
			return digests(`${name}/iter_000000${step}`);
		};
		/** Loss, gradient norm and balancing loss of every step. */
		const numbers = (log: string) =>
			[...steps(log)].map(([step, values]) => [step, (JSON.parse(values) as number[]).slice(2, 5)] as const);
		const expected = new Map(numbers("lanes.jsonl"));
		for (const layout of ["1+1", "1+tp4ep4", "tp2dp2+tp2, ZeRO-1"] as const) {
			const name = `lanes-${layout.replaceAll(/\W/g, "-")}`;
			expect(moved(layout, "lanes", 2)).toEqual(digests("lanes/iter_0000002"));
			const there = `--train-iters 4 --load lanes --ckpt-step 2 --save ${name} --save-interval 9`;
			trainWell(layout, `${heads} ${there} --log-json ${name}.jsonl`);
			expect(moved(home, name, 4)).toEqual(digests(name));
			trainWell(home, `${heads} --train-iters 6 --load ${name} --log-json ${name}.jsonl`);
			const resumed = numbers(`${name}.jsonl`);
			expect(resumed.map(([step]) => step)).toEqual([3, 4, 5, 6]);
			for (const [step, found] of resumed) {
				const errors = found.map((value, i) => Math.abs(value / expected.get(step)![i]! - 1));
				expect({ layout, step, within: Math.max(...errors) < tolerance }).toEqual({ layout, step, within: true });
			}
		}
	}, 180_000);
});

describe("what the checkpoint must agree with", () => {
	beforeAll(() => {
		mkdirSync(at("hf"));
		writeFileSync(at("hf/config.json"), "{}");
	});
	const resume = (more: string) => train("colocated", `--train-iters 6 --load whole ${more}`);
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
		const output = trainWell(
			"1+1",
			"--train-iters 1 --lr 1e-3 --seed 7 --pretrained-checkpoint whole --log-json fine.jsonl",
		);
		expect(output).toContain("Loaded the weights of whole/iter_0000004.");
		expect([...steps("fine.jsonl").keys()]).toEqual([1]);
		const absent = train("colocated", "--train-iters 1 --pretrained-checkpoint nowhere");
		expect([absent.exitCode, absent.stderr]).toEqual([
			1,
			expect.stringContaining("nowhere (pretrained-checkpoint) holds no native or torch_dist checkpoint"),
		]);
	}, 60_000);
});

test("without the optimizer: saved so, and loaded so", () => {
	const stopped = train(
		"colocated",
		"--train-iters 4 --save bare --save-interval 100 --no-save-optim --exit-duration-in-mins 1e-4",
	);
	expect([stopped.exitCode, stopped.stderr]).toEqual([0, ""]);
	expect(stopped.stdout).toContain("Stopped after step 1: the time of 0.0001 minutes is over.");
	expect(Object.keys(digests("bare")).filter((name) => name.startsWith("optimizer."))).toEqual([]);
	const refused = train("colocated", "--train-iters 4 --load bare");
	expect([refused.exitCode, refused.stderr]).toEqual([
		1,
		expect.stringContaining("was saved without its optimizer; --no-load-optim goes on with a new one."),
	]);
	trainWell("colocated", "--train-iters 3 --load bare --no-load-optim --log-json bare.jsonl");
	const rates = [...steps("bare.jsonl")].map(([step, values]) => [step, JSON.parse(values)[1]]);
	// The schedule begins anew, as Megatron's does.
	expect(rates.map(([step]) => step)).toEqual([2, 3]);
	expect(rates[0]![1]).toBe(2e-3);
}, 60_000);

test("a Hugging Face folder's config.json and names come back through checkpoints", () => {
	writeFileSync(at("text.txt"), "in the beginning was the word ".repeat(200));
	const tiny = "train --preset nemotron-tiny --hidden-size 64 --seq-length 32 --lr-warmup-iters 0 --lr-decay-iters 9";
	const text = (more: string) => {
		const args = `${tiny} --data-path text.txt --split 100,0,0 ${deviceFlags} --log-interval 5 ${more}`.split(" ");
		const { exitCode, stderr } = mimo(args, folder);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	};
	text("--train-iters 1 --save-hf hf-first");
	const config = join(at("hf-first"), "config.json");
	writeFileSync(config, readFileSync(config, "utf8").replace("{", '{\n  "remark": "kept",'));
	text("--train-iters 1 --load-hf hf-first --save from-hf --save-interval 9");
	text("--train-iters 2 --load from-hf --save from-hf --save-interval 9");
	const converted = mimo(["convert-ckpt", "--to", "hf", "from-hf", "hf-again", "--verify"], folder);
	expect([converted.exitCode, converted.stderr]).toEqual([0, ""]);
	expect(readFileSync(join(at("hf-again"), "config.json"), "utf8")).toBe(readFileSync(config, "utf8"));
}, 60_000);

test("through Megatron's format and back: the same tensors, and the training goes on bit by bit", () => {
	for (const [to, source, target] of [
		["torch_dist", "whole", "megatron"],
		["native", "megatron", "returned"],
	] as const) {
		const { exitCode, stderr } = mimo(["convert-ckpt", "--to", to, source, target, "--verify"], folder);
		expect([exitCode, stderr]).toEqual([0, ""]);
	}
	expect(digests("returned")).toEqual(digests("whole"));
	trainWell(reference, "--train-iters 6 --load returned --log-json returned.jsonl");
	trainWell(reference, "--train-iters 6 --load whole --log-json direct.jsonl");
	expect([...steps("returned.jsonl").keys()]).toEqual([5, 6]);
	expect(steps("returned.jsonl")).toEqual(steps("direct.jsonl"));
}, 60_000);

describe("damage", () => {
	test("an altered newest checkpoint is named; --allow-fallback takes the one before", () => {
		cpSync(at("whole"), at("altered"), { recursive: true });
		const data = at("altered/iter_0000004/data");
		const file = join(data, readdirSync(data).sort()[0]!);
		const bytes = readFileSync(file);
		bytes[bytes.length - 5]! ^= 1;
		writeFileSync(file, bytes);
		const common = "--train-iters 4 --load altered --save altered-again --save-interval 100 --log-json altered.jsonl";
		const refused = train(reference, common);
		expect(refused.exitCode).toBe(1);
		expect(refused.stderr).toMatch(
			/altered\/iter_0000004\/data\/r00000-000\.safetensors is damaged: the checksum of tensor \S+ differs\. The newest good checkpoint is altered\/iter_0000002 \(--allow-fallback takes it\)/,
		);
		const taken = train(reference, `${common} --allow-fallback`);
		expect(taken.exitCode).toBe(0);
		expect(taken.stderr).toContain("Going on from altered/iter_0000002, an older checkpoint (--allow-fallback).");
		expect(digests("altered-again")).toEqual(digests("whole"));
	}, 120_000);
});

test("old checkpoints go: --keep and --save-retain-interval", () => {
	trainWell("colocated", "--train-iters 7 --save kept --save-interval 1 --keep 2 --save-retain-interval 3");
	expect(readdirSync(at("kept")).sort()).toEqual(["iter_0000003", "iter_0000006", "iter_0000007", "latest.json"]);
}, 60_000);

describe("processes that end", () => {
	let started: Launched | null = null;
	const start = (more: string) => {
		started = Launched.run([executable, ...flags(reference, more)], { cwd: folder });
		return started;
	};
	afterAll(() => {
		started?.process.kill("SIGKILL");
	});

	test("SIGTERM saves and exits with 75; the next run goes on", async () => {
		const common =
			"--train-iters 8 --save asked --load asked --save-interval 100 --exit-signal-handler --log-json asked.jsonl";
		const launched = start(common);
		await launched.said(/ iteration +2\//);
		launched.signal(launched.process.pid, "SIGTERM");
		const ended = await launched.end();
		expect(ended.exitCode).toBe(75);
		expect(ended.stdout).toMatch(/Stopped by SIG\w+ after step \d+\./);
		trainWell(reference, common);
		trainWell(reference, "--train-iters 8 --log-json unasked.jsonl");
		expect(steps("asked.jsonl")).toEqual(steps("unasked.jsonl"));
	}, 120_000);

	test("SIGINT saves and exits with 130; the next run goes on", async () => {
		const common = "--train-iters 8 --save broken --load broken --save-interval 100 --log-json broken.jsonl";
		const launched = start(common);
		await launched.said(/ iteration +2\//);
		launched.signal(launched.process.pid, "SIGINT");
		const ended = await launched.end();
		expect([ended.exitCode, ended.stderr]).toEqual([
			130,
			expect.stringContaining(" and saves a checkpoint; Ctrl-C again "),
		]);
		expect(ended.stdout).toMatch(/^Saved the checkpoint of step (\d+)[\s\S]*^Interrupted: stopped after step \1\.$/m);
		trainWell(reference, common);
		trainWell(reference, "--train-iters 8 --log-json unbroken.jsonl");
		expect(steps("broken.jsonl")).toEqual(steps("unbroken.jsonl"));
	}, 120_000);

	/** Kills; with MIMO_TEST_FULL as many as the acceptance list says. */
	const kills = process.env.MIMO_TEST_FULL ? 50 : 2;
	const iterations = process.env.MIMO_TEST_FULL ? 400 : 20;
	test(`${kills} kills at random moments of steps and saves: nothing is lost, the log is that of one run`, async () => {
		trainWell(reference, `--train-iters ${iterations} --log-json unkilled.jsonl`);
		let state = 11;
		for (let kill = 0; kill < kills; kill++) {
			const launched = start(
				`--train-iters ${iterations} --save killed --load killed --save-interval 1 --keep 2 --async-save --log-json killed.jsonl`,
			);
			await launched.said(/ iteration +\d+\//);
			state = (state * 48271) % 2147483647;
			await Bun.sleep(state % 1200);
			launched.signal(launched.process.pid, "SIGKILL");
			await launched.end();
			for (let i = 0; i < 100 && launched.pids.some(alive); i++) await Bun.sleep(20);
			if (!existsSync(at("killed/latest.json"))) continue;
			using checkpoint = NativeCheckpoint.openExactly(at("killed"));
			checkpoint.verify();
		}
		trainWell(
			reference,
			`--train-iters ${iterations} --save killed --load killed --save-interval 1 --keep 2 --async-save --log-json killed.jsonl`,
		);
		expect(steps("killed.jsonl")).toEqual(steps("unkilled.jsonl"));
	}, 1_800_000);
});

describe("a full disk", () => {
	/**
	 * Runs a training with `full` as a file system for `checkpoints` of them, after `before`; null where that is not allowed.
	 */
	function onFullDisk(more: string, checkpoints = 1.6, before: (bytes: number) => string = () => "true") {
		mkdirSync(at("full"), { recursive: true });
		const checkpoint = at("whole/iter_0000002");
		const files = readdirSync(checkpoint, { recursive: true }) as string[];
		const bytes = files.reduce((sum, file) => sum + statSync(join(checkpoint, file)).size, 0);
		const script = `mount -t tmpfs -o size=${Math.ceil(checkpoints * bytes)} tmpfs full && ${before(bytes)} && "$0" "$@"; code=$?; ls full; ls full/*; exit $code`;
		const allowed = Bun.spawnSync(["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs full"], { cwd: folder });
		if (!allowed.success) {
			console.error("skip: no file system can be mounted here");
			return null;
		}
		const command = ["unshare", "-rm", "sh", "-c", script, executable, ...flags("1+1", more)];
		const { exitCode, stdout, stderr } = Bun.spawnSync(command, { cwd: folder, stdout: "pipe", stderr: "pipe" });
		return { exitCode, stdout: stdout.toString(), stderr: stderr.toString() };
	}

	test("ends the training with one sentence and keeps the checkpoint before", () => {
		const ended = onFullDisk("--train-iters 6 --save full --save-interval 2");
		if (ended === null) return;
		expect(ended.exitCode).toBe(1);
		expect(ended.stderr).toMatch(
			/The checkpoint of step 4 was not saved: Cannot write full\/\S+: no space left on the device/,
		);
		expect(ended.stdout).toContain("Saved the checkpoint of step 2");
		expect(ended.stdout.slice(ended.stdout.lastIndexOf("Saved"))).toMatch(/\niter_0000002\nlatest\.json\n/);
	}, 60_000);

	test("that has no room for a checkpoint is refused before the first step", () => {
		const ended = onFullDisk("--train-iters 6 --save full --save-interval 2", 0.6);
		if (ended === null) return;
		expect(ended.exitCode).toBe(1);
		expect(ended.stderr).toMatch(
			/^mimo: rank 0 .* failed: --save full: a checkpoint needs \S+ MB \(\d+ bytes\), but only \S+ .B \(\d+ bytes\) are free there /,
		);
		expect(ended.stdout).not.toContain("iteration");
	}, 60_000);

	test("that a killed save has filled has room: the next save removes what is left", () => {
		const leftover = (bytes: number) =>
			`mkdir full/iter_0000002.tmp-a && head -c ${Math.ceil(1.2 * bytes)} /dev/zero > full/iter_0000002.tmp-a/half`;
		const ended = onFullDisk("--train-iters 2 --save full --save-interval 2", 1.6, leftover);
		if (ended === null) return;
		expect({ exitCode: ended.exitCode, stderr: ended.stderr }).toEqual({ exitCode: 0, stderr: "" });
		expect(ended.stdout).toContain("Saved the checkpoint of step 2");
	}, 60_000);

	test("with --save-retry training goes on", () => {
		const ended = onFullDisk("--train-iters 5 --save full --save-interval 2 --save-retry");
		if (ended === null) return;
		expect(ended.stderr).toMatch(
			/The checkpoint of step 4 was not saved, training goes on: Cannot write full\/\S+: no space left/,
		);
		expect(ended.stdout).toMatch(/ iteration +5\/ /);
		expect([ended.exitCode, ended.stderr]).toEqual([
			1,
			expect.stringContaining("The checkpoint of step 5 was not saved"),
		]);
	}, 60_000);
});
