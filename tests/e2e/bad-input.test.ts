/** A mistake in the input or a lack of the machine gives one sentence and an exit code, and leaves no file behind. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, existsSync, symlinkSync, truncateSync, writeFileSync } from "node:fs";
import { openSafetensors, type TensorEntry, writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { exitCodes } from "../../src/system/exit-codes.ts";
import { golden } from "../golden.ts";
import { SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

/** Trains until the refusal; its sentence. */
function refusal(flags: readonly string[], environment: Record<string, string> = {}): string {
	const outcome = run.train(["--train-iters", "4", ...flags, "--save-hf", "never"], environment);
	expect(outcome.exitCode).toBeGreaterThan(0);
	expect(outcome.stderr).not.toMatch(/^\s+at /m);
	expect(outcome.stderr.trim()).not.toContain("\n");
	expect(existsSync(run.path("never"))).toBeFalse();
	return outcome.stderr.trim();
}

const cases: readonly [name: string, flags: string[], message: RegExp][] = [
	["a missing file", ["--data-path", "absent.txt"], /^mimo: The data file .*absent\.txt does not exist\.$/],
	["a loss that is not finite", ["--lr", "1e30", "--min-lr", "0"], /^mimo: Step \d+: the .* is not finite; .*\.$/],
	["too little text", ["--seq-length", "100000"], /fewer than one sample of sequence-length 100000/],
	["tokens outside the vocabulary", ["--vocab-size", "64"], /outside the vocabulary of vocab-size 64\.$/],
	["a tokenizer that is none", ["--tokenizer", "text.txt"], /^mimo: The tokenizer file .*text\.txt .*\.$/],
	[
		"a model that the disk cannot take at the end",
		["--hidden-size", "1000000000000"],
		/^mimo: --save-hf never: the model needs [\d.]+ .B \(\d+ bytes\), but only .* are free there\.$/,
	],
	[
		"a file where checkpoints should go",
		["--save", "text.txt", "--save-interval", "2"],
		/^mimo: --save text\.txt cannot be written: .*text\.txt is not a folder\.$/,
	],
	[
		"a file where checkpoints should be",
		["--load", "text.txt"],
		/^mimo: text\.txt \(load\) is no folder of checkpoints\.$/,
	],
	[
		"a file as weights to begin with",
		["--pretrained-checkpoint", "text.txt"],
		/^mimo: text\.txt \(pretrained-checkpoint\) holds no/,
	],
	["a link to itself as data", ["--data-path", "circle"], /^mimo: The data file circle does not exist\.$/],
	[
		"a link to itself as tokenizer",
		["--tokenizer", "circle"],
		/^mimo: Cannot open the tokenizer file circle: it is a symbolic link/,
	],
	[
		"a trace that cannot be written when its steps are over",
		["--profile-step-start", "3", "--profile-file", "text.txt/trace.json"],
		/^mimo: --profile-file text\.txt\/trace\.json cannot be written: .*text\.txt is not a folder\.$/,
	],
	[
		"a list of skipped samples that cannot be written when the first is skipped",
		["--data-skipped-file", "."],
		/^mimo: --data-skipped-file \. cannot be written: it is a folder\.$/,
	],
	[
		"a file where recordings should go",
		["--flight-recorder-dir", "text.txt"],
		/^mimo: --flight-recorder-dir text\.txt cannot be written: .*text\.txt is not a folder\.$/,
	],
	["a log in a folder's place", ["--log-json", "."], /^mimo: The log \. cannot be written: it is a folder\.$/],
];
symlinkSync("circle", run.path("circle"));
for (const [name, flags, message] of cases) test(name, () => expect(refusal(flags)).toMatch(message));

test("a bound that leaves experts without room", () => {
	const layout = ["--llm-dp", "2", "--llm-ep", "2", "--moe-expert-capacity-bound", "1"];
	const { exitCode, stderr } = run.train(["--train-iters", "4", ...layout, "--save-hf", "never"]);
	expect(exitCode).toBeGreaterThan(0);
	expect(stderr).toMatch(
		/Layer \d: the experts of rank ([01]) were sent \d+ rows in one microbatch, and moe-expert-capacity-bound 1 gives room for 512; 1\.\d+ would have been enough \(in its first step/,
	);
	expect(stderr).not.toMatch(/^\s+at /m);
	expect(existsSync(run.path("never"))).toBeFalse();
});

test("an absent library", () => {
	expect(refusal([], { MIMO_CPU_LIBRARY: "/nowhere.so" })).toBe(
		"mimo: MIMO_CPU_LIBRARY names /nowhere.so, which does not exist.",
	);
});

test("a processor without AVX2", () => {
	expect(refusal([], { MIMO_CPU_INSTRUCTIONS: "sse2" })).toMatch(
		/^mimo: This processor \(.+\) has no AVX2 and FMA, which the CPU library needs\.$/,
	);
});

test("instructions that no library knows", () => {
	expect(refusal([], { MIMO_CPU_INSTRUCTIONS: "avx-2" })).toBe(
		'mimo: MIMO_CPU_INSTRUCTIONS is "avx-2"; allowed is sse2, avx2, avx512.',
	);
});

test("OpenBLAS kernels that the library does not have", () => {
	const { exitCode, stderr } = run.train(["--train-iters", "4"], { MIMO_OPENBLAS_CORETYPE: "Pentium" });
	expect(stderr).toBe('mimo: MIMO_OPENBLAS_CORETYPE is "Pentium"; allowed is Haswell, Zen, SkylakeX, Cooperlake.\n');
	expect(exitCode).toBe(exitCodes.usage);
});

describe("weights", () => {
	const same =
		"--hybrid-layer-pattern ME*M-E --vocab-size 512 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 " +
		"--ffn-hidden-size 128 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 16 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 96";
	const reference = () => golden("hybrid-tiny");
	const file = "broken/model.safetensors";

	/** A copy of the reference model whose tensors went through `change`. */
	function changed(change: (entry: TensorEntry) => TensorEntry): void {
		cpSync(reference(), run.path("broken"), { recursive: true });
		using source = openSafetensors(`${reference()}/model.safetensors`);
		const entries = Array.from(source.tensors.keys(), (name) => {
			const { dtype, shape } = source.information(name);
			return change({ name, dtype, shape, data: () => source.read(name) });
		});
		writeSafetensors(run.path(file), entries);
	}
	const head = (change: Partial<TensorEntry>) => (entry: TensorEntry) =>
		entry.name === "lm_head.weight" ? { ...entry, ...change } : entry;

	test("of another model", () => {
		const flags = same.replace("--vocab-size 512", "").split(/ +/);
		expect(refusal([...flags, "--load-hf", reference()])).toMatch(
			/^mimo: vocab-size \(preset nemotron-tiny\): the value is 256; .*config\.json says 512\.$/,
		);
	});

	test("in a truncated file", () => {
		cpSync(reference(), run.path("broken"), { recursive: true });
		truncateSync(run.path(file), 100_000);
		expect(refusal([...same.split(" "), "--load-hf", "broken"])).toMatch(
			/model\.safetensors is not a valid safetensors file: .*\(truncated\?\)\.$/,
		);
	});

	test("of the wrong shape", () => {
		changed(head({ shape: [1], data: () => Float32Array.of(1) }));
		expect(refusal([...same.split(" "), "--load-hf", "broken"])).toMatch(/lm_head\.weight.* \[1\]/);
	});

	test("of the wrong dtype", () => {
		changed(head({ dtype: "I32", data: () => new Int32Array(512 * 64) }));
		expect(refusal([...same.split(" "), "--load-hf", "broken"])).toMatch(
			/output_layer\.weight in broken is I32; weights are F32, BF16 or F16\.$/,
		);
	});
});

describe("tokens", () => {
	const tokens = (dtype: "I32" | "F32", shape: readonly number[]) => {
		const count = shape.reduce((product, size) => product * size, 1);
		const data = () => (dtype === "I32" ? new Int32Array(count) : new Float32Array(count));
		writeSafetensors(run.path("tokens.safetensors"), [{ name: "tokens", dtype, shape, data }]);
	};

	test("of the wrong dtype or shape, or none", () => {
		tokens("F32", [8, 65]);
		expect(refusal(["--data-path", "tokens.safetensors"])).toMatch(/tokens in .* is F32; token ids are I32 or I64\.$/);
		tokens("I32", [8, 64]);
		expect(refusal(["--data-path", "tokens.safetensors"])).toMatch(
			/has shape \[8, 64\]; seq-length 64 needs \[samples, 65\]\.$/,
		);
		writeSafetensors(run.path("tokens.safetensors"), []);
		expect(refusal(["--data-path", "tokens.safetensors"])).toMatch(/has no tensor tokens\.$/);
	});

	test("in a truncated file", () => {
		tokens("I32", [8, 65]);
		truncateSync(run.path("tokens.safetensors"), 1000);
		expect(refusal(["--data-path", "tokens.safetensors"])).toMatch(/\(truncated\?\)\.$/);
		writeFileSync(run.path("tokens.safetensors"), "");
		expect(refusal(["--data-path", "tokens.safetensors"])).toMatch(
			/tokens\.safetensors is not a valid safetensors file/,
		);
	});
});
