/** `mimo train --lora-rank`: from a base to adapters and back, resumed on other layouts, refused where it cannot be. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, existsSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { openHuggingFaceModel } from "../../src/checkpoint/hf/parts.ts";
import { NativeCheckpoint } from "../../src/checkpoint/native/reader.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { golden } from "../golden.ts";
import { SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

const base = golden("hybrid-tiny");
const model =
	"--hybrid-layer-pattern ME*M-E --vocab-size 512 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 " +
	"--ffn-hidden-size 128 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --mamba-chunk-size 32 " +
	"--moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 96 --global-batch-size 8 --micro-batch-size 2 " +
	"--lr 1e-3 --lr-warmup-iters 0 --lr-decay-iters 8 --split 100,0,0 --threads 1";
const adapters = "--lora-rank 4 --lora-alpha 8 --lora-dropout 0.1";

const train = (flags: string) => run.train(`${model} ${flags}`.split(" "));
function trainWell(flags: string): string {
	const { exitCode, stdout, stderr } = train(flags);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	return stdout;
}
function convert(flags: string): void {
	const { exitCode, stderr } = mimo(["convert-ckpt", ...flags.split(" ")], run.folder);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
}

/** Digest of every tensor, the optimizer's included. */
function digests(root: string): Record<string, string> {
	using checkpoint = NativeCheckpoint.open(run.path(root));
	return Object.fromEntries(
		[...checkpoint.tensors.keys()]
			.sort()
			.map((name) => [
				name,
				new Bun.CryptoHasher("sha256").update(readTensor(checkpoint, name) as Float32Array).digest("hex"),
			]),
	);
}
const values = (folder: string, file = "model.safetensors") => readFileSync(join(run.path(folder), file));

describe("a base, adapters, a merged model", () => {
	const tp2 = "--llm-tp 2";
	test("trains adapters on it, resumes bit by bit, and leaves both kinds of folders", () => {
		const whole = trainWell(
			`${adapters} ${tp2} --load-hf ${base} --train-iters 4 --save whole --save-interval 4 --save-hf merged --save-peft peft`,
		);
		expect(whole).toContain("Training adapters of 0.01 M parameters for 0.28 M parameters (ME*M-E)");
		expect(whole).toContain("Files: checkpoints whole, weights merged, adapters peft.");
		trainWell(`${adapters} ${tp2} --load-hf ${base} --train-iters 2 --save parts --save-interval 2`);
		trainWell(`${adapters} ${tp2} --train-iters 4 --load parts --save parts --save-interval 2`);
		const expected = digests("whole");
		expect(digests("parts")).toEqual(expected);
		const states = Object.keys(expected).filter((name) => name.startsWith("optimizer."));
		expect(states).toHaveLength(3 * Object.keys(expected).filter((name) => /^language.*adapter/.test(name)).length);
	}, 60_000);

	test("another layout starts from the same numbers", () => {
		for (const layout of ["--llm-pp 2", "--llm-dp 2 --llm-ep 2 --use-distributed-optimizer"]) {
			const to = layout.replaceAll(/\W+/g, "");
			trainWell(`${adapters} ${layout} --train-iters 4 --load whole --save ${to} --save-interval 4`);
			expect(digests(to)).toEqual(digests("whole"));
		}
	}, 60_000);

	test("conversions write what the run has written", () => {
		convert("--to hf whole converted --verify");
		expect(values("converted").equals(values("merged"))).toBeTrue();
		convert("--to peft whole converted-peft --verify");
		const [file, settings] = ["adapter_model.safetensors", "adapter_config.json"];
		expect(values("converted-peft", settings).toString()).toBe(values("peft", settings).toString());
		expect(values("converted-peft", file).equals(values("peft", file))).toBeTrue();
		convert(`--to hf --adapters peft ${base} from-peft --verify`);
		expect(values("from-peft").equals(values("merged"))).toBeTrue();
	}, 60_000);

	test("a run goes on without the folder that it began from, and names adapters as that does", () => {
		cpSync(golden("qwen3"), join(run.folder, "lent"), { recursive: true });
		const small = "--data-path text.txt --split 99,1,0 --seq-length 32 --global-batch-size 2 --lora-rank 4";
		const go = (flags: string) => {
			const { exitCode, stderr } = mimo(["train", ...`${flags} ${deviceFlags}`.split(" ")], run.folder);
			expect([exitCode, stderr]).toEqual([0, ""]);
		};
		go(`${small} --load-hf lent --train-iters 1 --lr-decay-iters 9 --save going`);
		rmSync(join(run.folder, "lent"), { recursive: true });
		go("--load going --train-iters 2 --save-hf lent-whole");
		go("--load going --train-iters 3 --save-peft lent-peft");
		convert("--to peft going lent-converted");
		const file = "adapter_model.safetensors";
		expect(values("lent-peft", file).equals(values("lent-converted", file))).toBeTrue();
		expect(values("lent-whole", "config.json").equals(readFileSync(join(golden("qwen3"), "config.json")))).toBeTrue();
	}, 60_000);

	test("adapters that make values infinite are not merged", () => {
		cpSync(join(run.folder, "peft"), join(run.folder, "infinite"), { recursive: true });
		const file = join(run.folder, "infinite/adapter_config.json");
		const config = JSON.parse(readFileSync(file, "utf8"));
		const merge = (alpha: string) => {
			writeFileSync(
				file,
				JSON.stringify({ ...config, lora_alpha: 0 }).replace('"lora_alpha":0', `"lora_alpha":${alpha}`),
			);
			const flags = ["--to", "hf", "--adapters", "infinite", base, "never", "--verify"];
			const { exitCode, stderr } = mimo(["convert-ckpt", ...flags], run.folder);
			expect([exitCode, existsSync(join(run.folder, "never"))]).toEqual([1, false]);
			return stderr;
		};
		expect(merge("1e308")).toMatch(
			/^mimo: .*: with its adapter merged, language_model\.\S+ has an infinite value or NaN as element \d+\.\n$/,
		);
		expect(merge("1e999")).toMatch(
			/^mimo: infinite\/adapter_config\.json: lora_alpha is null, which no adapter of this program has\.\n$/,
		);
	}, 30_000);

	test("a pipeline stage may have no adapter", () => {
		const attention = "--lora-rank 4 --lora-target-modules linear_qkv linear_proj --train-iters 1";
		trainWell(`${attention} --load-hf ${base} --save-peft attention`);
		trainWell(`${attention} --load-hf ${base} --save-peft half --llm-pp 2`);
		expect(values("half", "adapter_config.json")).toEqual(values("attention", "adapter_config.json"));
	}, 30_000);

	test("evaluate and generate read the adapters with the checkpoint", () => {
		const both = [
			["--load", "whole"],
			["--load-hf", "merged"],
		].map((from) => {
			const flags = [...from, "--data", "text.txt", "--samples", "8", "--seq-length", "64", "--bytes", "--json"];
			const { exitCode, stdout, stderr } = mimo(["evaluate", ...flags, ...deviceFlags.split(" ")], run.folder);
			expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
			return (JSON.parse(stdout) as { datasets: { loss: number }[] }).datasets[0]!.loss;
		});
		expect(Math.abs(both[0]! / both[1]! - 1)).toBeLessThan(1e-5);
		const words = ["--prompt", "in the", "--max-new-tokens", "2", ...deviceFlags.split(" ")];
		expect(mimo(["generate", "--load", "whole", ...words], run.folder).exitCode).toBe(0);
	}, 30_000);

	test("--load-peft goes on from the adapters, --pretrained-checkpoint takes a base", () => {
		const still = "--lr 0 --min-lr 0 --train-iters 1";
		// The folder says rank and α.
		trainWell(`${still} --load-hf ${base} --load-peft peft --llm-pp 2 --save-peft again --save-hf same`);
		const file = "adapter_model.safetensors";
		expect(values("again", file).equals(values("peft", file))).toBeTrue();
		expect(values("same").equals(values("merged"))).toBeTrue();
		trainWell(`--load-hf ${base} ${still} --save base --save-interval 1 --moe-router-bias-update-rate 0`);
		trainWell(`${adapters} ${still} --pretrained-checkpoint base --load-peft peft --save-hf once-more`);
		// Experts one by one, as published folders have them.
		using one = openHuggingFaceModel(run.path("once-more"));
		using other = openHuggingFaceModel(run.path("merged"));
		for (const name of other.weights.tensors.keys()) {
			expect(readTensor(one.weights, name)).toEqual(readTensor(other.weights, name));
		}
	}, 60_000);
});

describe("one sentence before the first step", () => {
	const refusal = (flags: string) => {
		const { exitCode, stderr, stdout } = train(`--train-iters 1 ${flags}`);
		expect([exitCode === 0, stdout.includes("iteration")]).toEqual([false, false]);
		return stderr.trim().replace(/^mimo: /, "");
	};

	for (const [flags, sentence] of [
		["--lora-dropout 0.1", "--lora-dropout: the value is 0.1; it needs lora-rank."],
		["--save-peft p", '--save-peft: the value is "p"; it needs lora-rank.'],
		["--lora-rank 0", "--lora-rank: the value is 0; allowed is an integer of at least 1."],
		[
			"--lora-rank 2 --freeze-lm",
			"--freeze-lm: the value is true; allowed is false with lora-rank, whose adapters train.",
		],
		["--lora-rank 2 --lora-target-modules q_proj", "allowed is one or more of: linear_qkv, linear_q_proj,"],
		[
			"--lora-rank 2 --hybrid-layer-pattern M --lora-target-modules linear_qkv",
			"allowed is a projection that a layer of M has.",
		],
		[
			"--lora-rank 2 --lora-target-modules experts.linear_fc1 --llm-tp 2 --llm-expt-tp 2",
			"allowed are projections of routed experts only with llm-expt-tp 1, and it is 2.",
		],
		["--lora-rank 2 --lora-target-modules experts.linear_fc1 --lora-dropout 0.1", "allowed is 0 where routed experts"],
		[
			"--lora-rank 2 --lora-target-modules linear_qkv vision_model.linear_qkv",
			"vision_model.linear_qkv is of an encoder, which this model has not.",
		],
	] as const) {
		test(flags, () => expect(refusal(flags)).toContain(sentence));
	}

	test("adapters of other settings, and checkpoints with and without", () => {
		expect(refusal("--lora-rank 2 --load-peft peft")).toBe(
			"--lora-rank: the value is 2; peft/adapter_config.json says 4.",
		);
		expect(refusal("--lora-rank 4 --lora-alpha 16 --load whole")).toBe(
			`${run.path("whole/iter_0000004").replace(`${run.folder}/`, "")} holds another model: --lora-alpha is 8 there and 16 here.`,
		);
		expect(refusal("--load whole")).toMatch(/holds another model: --lora-rank is 4 there and unset here; /);
		expect(refusal(`${adapters} --load base`)).toMatch(
			/^base\/iter_0000001 has no adapters to go on with; --finetune \(or --pretrained-checkpoint\) takes its weights/,
		);
		expect(refusal(`--load-peft ${golden("lora-peft")}/own`)).toMatch(
			/\(load-peft\) has a lora_A for each of .*q_proj.*which are one projection here; `mimo convert-ckpt --to hf --adapters/,
		);
	}, 60_000);

	test("a folder that PEFT could not have, or that is not this training's", () => {
		const packed = `--load-hf ${base} --lora-rank 2 --lora-target-modules experts.linear_fc1 --save-peft p`;
		expect(refusal(packed)).toMatch(
			/^--save-peft p: PEFT has no place for the adapter of .*experts\.linear_fc1\.weight0, because .*experts\.up_proj of its base/,
		);
		cpSync(run.path("peft"), run.path("taken"), { recursive: true });
		expect(refusal("--lora-rank 2 --save-peft taken")).toBe(
			"--save-peft taken exists, and this training has not written it: name another folder, or remove this one.",
		);
	});
});

test("out_proj is written for PEFT with a warning: that package refuses it", () => {
	const { exitCode, stderr } = train("--lora-rank 2 --lora-target-modules out_proj --train-iters 1 --save-peft scan");
	expect(exitCode).toBe(0);
	expect(stderr).toContain(
		"scan has adapters on out_proj, which the peft package refuses for models with Mamba layers",
	);
}, 60_000);
