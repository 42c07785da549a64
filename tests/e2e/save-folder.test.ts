/** Folders that `mimo train` may write to: one run a folder, its own checkpoints, its own Hugging Face folder. */
import { afterAll, expect, test } from "bun:test";
import { cpSync, existsSync, mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { executable } from "../commands/mimo.ts";
import { Launched, survivors } from "../launch/launched.ts";
import { SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());
const start = "--lr-warmup-iters 0 --lr-decay-iters 100";
const train = (flags: string) => run.train(`${start} ${flags}`.split(" "));
const steps = (name: string) => readdirSync(run.path(name)).sort();

test("a run that lives keeps others out of its folder; one that was killed is succeeded at once", async () => {
	const small = "--preset nemotron-tiny --hidden-size 64 --seq-length 64 --log-interval 100 --device cpu";
	const flags = `${small} ${start} --data-path text.txt --train-iters 100000 --save two --save-interval 5 --keep 2 --llm-dp 2`;
	const first = Launched.run([executable, "train", ...flags.split(" ")], { cwd: run.folder });
	try {
		await first.said(/Saved the checkpoint of step 10 /);
		// As a job does that was put back into the queue too early.
		const second = train("--train-iters 20 --save two --load two --save-interval 5 --keep 2 --llm-dp 2");
		expect(second.exitCode).toBe(1);
		expect(second.stdout).toMatch(/process \d+ on \S+ writes to two \(--save\): waiting up to 10 s for its end\./);
		expect(second.stderr).toMatch(
			/two \(--save\) is written by process \d+ on \S+ since \S+: one run writes to a folder/,
		);
		// The first goes on saving.
		const { iteration } = JSON.parse(readFileSync(run.path("two/latest.json"), "utf8"));
		await first.said(new RegExp(`Saved the checkpoint of step ${iteration + 10} `));
	} finally {
		first.signal(first.process.pid, "SIGKILL");
		await first.end();
	}
	expect(await survivors(first.pids)).toEqual([]);
	expect(steps("two").some((name) => name.startsWith("writer-"))).toBeTrue();
	const started = performance.now();
	const third = train("--train-iters 1 --save two --save-over --save-interval 5");
	expect([third.exitCode, third.stderr]).toEqual([0, ""]);
	expect(performance.now() - started).toBeLessThan(8000);
	expect(steps("two").filter((name) => name.startsWith("writer-") || name.includes(".tmp-"))).toEqual([]);
}, 120_000);

test("checkpoints of another run are refused before a step, and --keep leaves them alone", () => {
	expect(train("--train-iters 8 --save old --save-interval 4").exitCode).toBe(0);
	const before = steps("old");
	const log = "--log-json other.jsonl";
	const other = `--train-iters 4 --seed 99 --save old --save-interval 2 --keep 1 ${log}`;
	const refused = train(other);
	expect([refused.exitCode, refused.stdout]).toEqual([1, ""]);
	expect(refused.stderr).toContain(
		"--save old holds iter_0000004 and iter_0000008, which this run neither loads nor has written: --load old goes on from the newest, --save-over lets",
	);
	expect(steps("old")).toEqual(before);
	cpSync(run.path("old"), run.path("copied"), { recursive: true });
	expect(train(`${other.replace("--save old", "--save copied")} --save-over`).exitCode).toBe(0);
	expect(steps("copied")).toEqual(["iter_0000004", "iter_0000008", "latest.json"]);
	// The run that goes on is as free as before.
	expect(train("--train-iters 12 --save old --load old --save-interval 4 --keep 1").exitCode).toBe(0);
	expect(steps("old")).toEqual(["iter_0000012", "latest.json"]);
}, 60_000);

test("--save-hf replaces what the same training wrote, and nothing else", () => {
	mkdirSync(run.path("mine"));
	writeFileSync(run.path("mine/thesis.tex"), "years of work");
	const refused = train("--train-iters 1 --save-hf mine");
	expect([refused.exitCode, refused.stdout, refused.stderr]).toEqual([
		1,
		"",
		"mimo: --save-hf mine exists, and this training has not written it: name another folder, or remove this one.\n",
	]);
	expect(readFileSync(run.path("mine/thesis.tex"), "utf8")).toBe("years of work");
	const common = "--save trained --load trained --save-interval 9 --save-hf weights";
	expect(train(`--train-iters 1 ${common}`).exitCode).toBe(0);
	const first = readFileSync(run.path("weights/model.safetensors"));
	const again = train("--train-iters 1 --save-hf weights");
	expect([again.exitCode, again.stderr]).toEqual([1, expect.stringContaining("has not written it")]);
	expect(train(`--train-iters 2 ${common}`).exitCode).toBe(0);
	expect(readFileSync(run.path("weights/model.safetensors")).equals(first)).toBeFalse();
}, 60_000);

test("files that a link brings into a model's or a tokenizer's folder are refused before the first step", () => {
	expect(train("--train-iters 1 --save-hf linked").exitCode).toBe(0);
	writeFileSync(run.path("id_rsa"), "secret");
	const refused = (flags: string, file: string) => {
		const { exitCode, stdout, stderr } = train(`--train-iters 1 --save-hf passed-on ${flags}`);
		const reason = `mimo: Cannot open ${file}: it is a link that leads out of its folder, to ${run.path("id_rsa")}.\n`;
		expect([exitCode, stdout, stderr]).toEqual([1, "", reason]);
		expect(existsSync(run.path("passed-on"))).toBeFalse();
	};
	symlinkSync("../id_rsa", run.path("linked/LICENSE"));
	refused("--load-hf linked", "linked/LICENSE");
	mkdirSync(run.path("words"));
	writeFileSync(run.path("words/tokenizer.json"), JSON.stringify(wordTokenizer));
	symlinkSync("../id_rsa", run.path("words/special_tokens_map.json"));
	refused("--tokenizer words", "words/special_tokens_map.json");
}, 60_000);

/** A tokenizer of two letters. */
const wordTokenizer = {
	...{ added_tokens: [], normalizer: null, pre_tokenizer: null, post_processor: null, decoder: null },
	model: { type: "BPE", unk_token: "a", vocab: { a: 0, b: 1 }, merges: [] },
};

test.each([
	["--position-embedding-type rope", "--position-embedding-type is none there and rope here"],
	["--no-squared-relu --swiglu", "--squared-relu is true there and false here; --swiglu is false there and true here"],
	["--model-provider nemotron-moe-vlm", "needs vision-projection-type mlp, vision-projection-norm, pixel-shuffle"],
])("%s has no place in a Hugging Face folder: refused before a step", (flags, sentence) => {
	const refused = train(`--train-iters 1 --save-hf never ${flags}`);
	expect([refused.exitCode > 0, refused.stdout]).toEqual([true, ""]);
	expect(refused.stderr).toContain(sentence);
});
