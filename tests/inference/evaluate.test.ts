/** `mimo evaluate` as a user runs it: losses of data sets and answers to questions, the same on every layout. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { DatasetLoss } from "../../src/inference/losses.ts";
import { scoreOf } from "../../src/inference/metrics.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, png, Scratch } from "../data/fixtures.ts";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const text = `--preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern ME*EM- --seq-length 64 --lr-warmup-iters 1 --lr 3e-3 --train-iters 30 --dataset-provider text --data-path text.txt --valid-data-path other.txt --eval-interval 30 --eval-iters 4 --z-loss-coeff 0.001 --save text --save-interval 30 ${deviceFlags}`;
const pictures = `--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 128 --micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 0 --train-iters 1 --init-method-std 0.1 --img-h 32 --img-w 32 --llm-offset 0 --caption-prompt what? --save pictures --save-interval 1 ${deviceFlags}`;

const run = (command: string) => mimo(command.split(" "), folder.path);
let trained = "";

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(80));
	folder.file("other.txt", "the lazy dog runs over the quick brown fox and jumps away. ".repeat(12));
	folder.file("a.png", png(20, 30, 1));
	folder.file("b.png", png(31, 17, 2));
	for (const flags of [text, pictures]) {
		const { exitCode, stdout, stderr } = run(`train ${flags}`);
		expect([exitCode, stderr]).toEqual([0, ""]);
		if (flags === text) trained = stdout;
	}
}, 60_000);

interface Report {
	readonly datasets: readonly DatasetLoss[];
	readonly questions: readonly {
		kind: string;
		right: number;
		of: number;
		answers: readonly { text: string; right: boolean; losses?: readonly number[] }[];
	}[];
}

function evaluated(command: string): Report {
	const { exitCode, stdout, stderr } = run(`evaluate ${command} --json ${deviceFlags}`);
	expect([exitCode, stderr]).toEqual([0, ""]);
	return JSON.parse(stdout) as Report;
}

describe("losses", () => {
	test("of a file are those that training measures", () => {
		const [found] = evaluated("--load text --data other.txt").datasets;
		expect(found).toMatchObject({ dataset: "other.txt", part: null, samples: 11, tokens: 11 * 64 });
		const heldOut = Number(/Held-out loss: ([\d.]+)/.exec(trained)![1]);
		expect(found!.loss).toBeCloseTo(heldOut, 3);
	}, 30_000);

	test("of several files, and on a layout", () => {
		const one = evaluated("--load text --data other.txt --data text.txt --samples 8").datasets;
		const several = evaluated(
			"--load text --data other.txt --data text.txt --samples 8 --llm-tp 2 --llm-dp 2 --llm-ep 2",
		).datasets;
		expect(one.map(({ samples }) => samples)).toEqual([8, 8]);
		expect(one[1]!.loss).toBeLessThan(one[0]!.loss);
		for (const [index, { loss, ...rest }] of several.entries()) {
			expect(rest).toEqual({ dataset: one[index]!.dataset, part: null, samples: 8, tokens: 512, budgets: [] });
			expect(Math.abs(loss / one[index]!.loss - 1)).toBeLessThan(1e-5);
		}
	}, 30_000);

	test("of the entries of a metadataset, each by itself", () => {
		captions(folder, "cats", [6], "0,1,0");
		captions(folder, "dogs", [5], "0,1,0");
		folder.file(
			"both.yaml",
			"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  val:\n    blend:\n      - {weight: 1, path: cats}\n      - {weight: 3, path: dogs}\n",
		);
		const both = evaluated("--load pictures --data both.yaml").datasets;
		expect(both.map(({ part, samples }) => [part, samples])).toEqual([
			["val", 6],
			["val", 5],
		]);
		const cats = evaluated("--load pictures --data cats --llm-offset 1 --llm-tp 2 --llm-ep 2").datasets[0]!;
		expect(cats.tokens).toBe(both[0]!.tokens);
		expect(Math.abs(cats.loss / both[0]!.loss - 1)).toBeLessThan(1e-5);
		const { stderr } = run("evaluate --load pictures --data cats --valid-data-split-part wal");
		expect(stderr).toMatch(/^mimo: cats has no part wal: --valid-data-split-part takes one of .*val.*\.\n$/);
	}, 60_000);

	test("of every sample once with its own pictures, whatever is left out and whichever ranks read", () => {
		captions(folder, "birds", [14], "0,1,0");
		const measure = (layout: string) => {
			const flags = `--data-too-long skip --seq-length 28 --json ${deviceFlags}${layout}`;
			const { exitCode, stdout, stderr } = run(`evaluate --load pictures --data birds ${flags}`);
			expect([exitCode, stderr]).toEqual([0, expect.stringMatching(/^\d+ samples are left out/)]);
			return (JSON.parse(stdout) as Report).datasets[0]!;
		};
		const { samples, tokens, loss } = measure("");
		expect(samples).toBeLessThan(14);
		for (const layout of [
			" --num-workers 0",
			" --llm-dp 2 --num-workers 3 --llm-offset 1",
			" --encoder-dp 2 --llm-offset 2",
			...(process.env.MIMO_TEST_FULL === "1" ? [" --llm-dp 2 --llm-offset 1", " --encoder-dp 2 --llm-tp 2"] : []),
		]) {
			const found = measure(layout);
			expect([layout, found.samples, found.tokens]).toEqual([layout, samples, tokens]);
			expect(Math.abs(found.loss / loss - 1)).toBeLessThan(1e-5);
		}
	}, 60_000);
});

describe("questions", () => {
	const questions = [
		{ prompt: "jumps over the ", answer: "lazy dog" },
		{ prompt: "jumps over the ", answers: ["mouse", "cat"] },
		{ prompt: "the quick brown ", choices: ["zebra", "fox", "qqq"], answer: "fox" },
		{ prompt: "the quick brown ", choices: ["zebra", "fox"], answer: "A" },
		{ prompt: "the lazy ", choices: ["dog", "xyz"], answer: 0 },
	];
	const write = () => folder.file("q.jsonl", questions.map((question) => JSON.stringify(question)).join("\n"));

	test("are answered, in a table and on layouts", () => {
		write();
		const { stdout, exitCode } = run(`evaluate --load text --questions q.jsonl ${deviceFlags}`);
		expect(exitCode).toBe(0);
		expect(stdout.split("\n").map((line) => line.split(/ {2,}/))).toEqual([
			["questions", "measure", "right", "accuracy"],
			["q.jsonl", "exact match", expect.stringMatching(/^[01] of 2$/), expect.any(String)],
			["q.jsonl", "multiple choice", "2 of 3", "66.7 %"],
			[""],
		]);
		const one = evaluated("--load text --questions q.jsonl").questions;
		const [, choices] = one;
		expect(choices!.answers.map(({ text: own, right }) => [own, right])).toEqual([
			["fox", true],
			["fox", false],
			["dog", true],
		]);
		for (const layout of ["--llm-tp 2 --llm-ep 2 --batch-size 3", "--llm-dp 2 --llm-ep 2"]) {
			const other = evaluated(`--load text --questions q.jsonl ${layout}`).questions;
			for (const [kind, { answers, ...rest }] of other.entries()) {
				expect(rest).toEqual({ ...one[kind]!, answers: undefined } as never);
				for (const [index, { text: own, losses = [] }] of answers.entries()) {
					const there = one[kind]!.answers[index]!;
					expect(own).toBe(there.text);
					for (const [at, loss] of losses.entries()) expect(Math.abs(loss / there.losses![at]! - 1)).toBeLessThan(1e-4);
				}
			}
		}
	}, 60_000);

	test("by other metrics, with a line of samples for every question", () => {
		write();
		const asked = "--load text --questions q.jsonl --metric anls --metric exact_match --max-new-tokens 12";
		const [exact] = evaluated(`${asked} --output samples.jsonl`).questions;
		const lines = readFileSync(join(folder.path, "samples.jsonl"), "utf8").trimEnd().split("\n");
		const samples = lines.map((line) => JSON.parse(line));
		expect(samples.map(({ doc_id, doc, target }) => [doc_id, doc, target])).toEqual(
			["lazy dog", ["mouse", "cat"], "fox", "zebra", "dog"].map((target, at) => [at, questions[at], target]),
		);
		expect(samples.slice(2).map(({ acc, filtered_resps: [text] }) => [acc, text])).toEqual([
			[1, "fox"],
			[0, "fox"],
			[1, "dog"],
		]);
		for (const [at, { exact_match, anls, filtered_resps, resps }] of samples.slice(0, 2).entries()) {
			const { text, right } = exact!.answers[at]!;
			expect([exact_match, filtered_resps, resps]).toEqual([Number(right), [text], [[text]]]);
			expect(anls).toBe(scoreOf("anls", text, [samples[at].target].flat()));
			expect(text.length).toBeGreaterThan(8);
		}
		for (const [flags, said] of [
			["--output samples.jsonl", "--output samples.jsonl exists already: name a new file."],
			["--metric bleu", '--metric is "bleu"; allowed is exact_match, accuracy, anls.'],
		]) {
			const { exitCode, stderr } = run(`evaluate --load text --questions q.jsonl ${flags} ${deviceFlags}`);
			expect(exitCode).toBeGreaterThan(0);
			expect(stderr).toBe(`mimo: ${said}\n`);
		}
	}, 60_000);

	test("about pictures: the losses of the choices follow the picture", () => {
		const ask = (image: string) => ({
			messages: [{ role: "user", content: "<image> what?" }],
			images: [image],
			choices: ["a cat", "dogs"],
			answer: "dogs",
		});
		folder.file("p.jsonl", ["a.png", "b.png", "a.png"].map((image) => JSON.stringify(ask(image))).join("\n"));
		const one = evaluated("--load pictures --questions p.jsonl").questions[0]!.answers.map(({ losses }) => losses!);
		expect(one[2]).toEqual(one[0]!);
		expect(Math.abs(one[1]![0]! / one[0]![0]! - 1)).toBeGreaterThan(1e-4);
		const other = evaluated("--load pictures --questions p.jsonl --llm-tp 2 --llm-ep 2 --llm-offset 1 --batch-size 4");
		for (const [index, { losses }] of other.questions[0]!.answers.entries()) {
			for (const [at, loss] of losses!.entries()) expect(Math.abs(loss / one[index]![at]! - 1)).toBeLessThan(1e-5);
		}
	}, 60_000);

	test.each([
		['{"prompt": "a"}', /^mimo: bad\.jsonl, line 1 has no answer\.\n$/],
		[
			'{"prompt": "a", "choices": ["x"], "answer": "x"}',
			/^mimo: bad\.jsonl, line 1: choices are a list of at least two texts\.\n$/,
		],
		[
			'{"prompt": "a", "choices": ["x", "y"], "answer": "z"}',
			/^mimo: bad\.jsonl, line 1: answer is "z"; it is the text, .* of 2 choices\.\n$/,
		],
		['{"prompt": "a", "choices": ["x", "y"], "answer": 2}', /^mimo: bad\.jsonl, line 1: answer is 2; /],
		[
			'{"messages": [{"role": "narrator", "content": "a"}], "answer": "b"}',
			/^mimo: bad\.jsonl, line 1 cannot be continued: its conversation has a turn of "narrator"; /,
		],
	])("%s is refused", (line, sentence) => {
		folder.file("bad.jsonl", line);
		const { exitCode, stdout, stderr } = run(`evaluate --load text --questions bad.jsonl ${deviceFlags}`);
		expect(stderr).toMatch(sentence);
		expect([exitCode, stdout]).toEqual([1, ""]);
	});

	test("settings that Energon data cannot be read with are refused as in training", () => {
		captions(folder, "owls", [4], "0,1,0");
		const { exitCode, stderr } = run("evaluate --load pictures --data owls --use-tiling --dynamic-resolution");
		const sentence = "mimo: To read owls, --use-tiling true: allowed only without dynamic-resolution.\n";
		expect([exitCode, stderr]).toEqual([2, sentence]);
	});

	test("--print-config shows what it would evaluate with, and stops", () => {
		const table = run("evaluate --load text --seed 5 --print-config");
		expect([table.exitCode, table.stderr]).toEqual([0, ""]);
		expect(table.stdout).toMatch(/^seed +5 +flag --seed$/m);
		expect(table.stdout).toMatch(/^hidden-size +\d+ +checkpoint text\b.*$/m);
		const { configuration, origins } = JSON.parse(run("evaluate --load text --seed 5 --print-config --json").stdout);
		expect([configuration.seed, origins.seed]).toEqual([5, "flag --seed"]);
	});

	test("nothing to evaluate is refused", () => {
		const { exitCode, stderr } = run("evaluate --load text");
		expect([exitCode, stderr]).toEqual([2, "mimo: mimo evaluate needs --data PATH or --questions FILE.jsonl.\n"]);
	});
});
