/** `mimo train` with an encoder: both modules in one process, and on disjoint grids of processes. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type LoggedSamples, readRunLog } from "../../src/observe/run-log/reader.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";
import { loggedSteps } from "./small-run.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-vision-language-"));
afterAll(() => rmSync(folder, { recursive: true }));

const small = `--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 2 --vision-hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 0 --train-iters 2 --adam-eps 1e-6 --log-interval 1 ${deviceFlags}`;

function train(name: string, ...flags: string[]) {
	const log = join(folder, `${name}.jsonl`);
	const outcome = mimo(["train", ...small.split(" "), "--log-json", log, ...flags], folder);
	return { ...outcome, log, steps: (outcome.exitCode === 0 ? loggedSteps(log) : []) as Record<string, number>[] };
}

const flags = (text: string) => text.split(" ");
const full = process.env.MIMO_TEST_FULL === "1";

describe("mock data", () => {
	// Lanes have mock samples of their own, so only layouts of equally many lanes train on the same.
	const one = train("one", ..."--llm-offset 0 --eval-iters 1 --eval-interval 2".split(" "));

	test("one process holds both modules", () => {
		expect([one.exitCode, one.stderr]).toEqual([0, ""]);
		expect(one.steps.map(({ iteration }) => iteration)).toEqual([1, 2, 2]);
		expect(one.steps[0]!["lm loss"]).toBeWithin(6, 6.6);
		// Half of every sequence is one image's tokens; the last image token predicts the first word.
		expect(one.steps[0]!.tokens).toBe(8 * 16);
		expect(one.stdout).toContain(" validation loss at iteration 2 | lm loss value: ");
	});

	const more = [
		["one rank a module", "--llm-offset 1"],
		["two encoder lanes for one language lane", "--encoder-dp 2"],
		["a pipeline of two stages", "--llm-pp 2"],
		["both modules on two ranks", "--llm-offset 0 --encoder-dp 2 --llm-pp 2"],
	] as const;
	test.each([
		["tensor parallelism on both sides", "--encoder-tp 2 --llm-tp 2 --llm-ep 2"],
		["three stages behind two encoder lanes", "--encoder-dp 2 --llm-pp 3"],
		["both modules on four ranks", "--llm-offset 0 --encoder-tp 4 --llm-tp 2 --llm-pp 2"],
		...(full ? more : []),
	])(
		"the same losses on %s",
		(name, layout) => {
			const other = train(name.replaceAll(" ", "-"), ...flags(layout), "--eval-iters", "1", "--eval-interval", "2");
			expect([other.exitCode, other.stderr]).toEqual([0, ""]);
			for (const [index, step] of one.steps.entries()) {
				expect(Math.abs(other.steps[index]!["lm loss"]! / step["lm loss"]! - 1)).toBeLessThan(2e-6);
			}
		},
		60_000,
	);

	test("both participation policies are measured, and recorded", () => {
		for (const step of one.steps.slice(0, 2)) {
			expect(step.encoder_participants).toBe(1);
			expect(step.grad_norm_exact).toBe(step.grad_norm!);
			expect(step.grad_norm_corrected).toBe(step.grad_norm!);
		}
	});
});

describe("frozen modules", () => {
	test("are not trained, the others are", () => {
		const layout = flags("--llm-offset 1 --train-iters 1 --no-vision-position-crop");
		const norm = (...freeze: string[]) => train(`frozen${freeze.join("")}`, ...layout, ...freeze).steps[0]!.grad_norm!;
		const [all, tower, language, projector] = [
			norm(),
			norm("--freeze-vit"),
			norm("--freeze-lm"),
			norm("--freeze-lm", "--freeze-vit"),
		];
		expect(tower).toBeLessThan(all);
		expect(projector).toBeLessThan(language);
		// Squared norms of disjoint sets of parameters add up.
		expect(projector ** 2).toBeCloseTo(tower ** 2 + language ** 2 - all ** 2, 4);
	}, 60_000);
});

test("a frozen tower that runs ahead gives the same losses, bit for bit", () => {
	const layout = flags("--encoder-dp 2 --llm-dp 2 --llm-ep 2 --freeze-vit --train-iters 3 --global-batch-size 12");
	const [plain, ahead] = [
		train("in-turn", ...layout),
		train(
			"ahead",
			...layout,
			...flags("--mimo-encoder-prefetch --mimo-encoder-prefetch-debug --save ahead --save-interval 3"),
		),
	];
	expect([plain.exitCode, ahead.exitCode, ahead.stderr]).toEqual([0, 0, ""]);
	for (const [index, step] of plain.steps.entries()) {
		expect(ahead.steps[index]!["lm loss"]).toBe(step["lm loss"]!);
		expect(ahead.steps[index]!.grad_norm).toBe(step.grad_norm!);
	}
	// The checkpoint is that of a model, which one process reads too.
	const said = mimo("generate --load ahead --prompt In --max-new-tokens 1 --device cpu".split(" "), folder);
	expect([said.exitCode, said.stderr.includes("mimo:")]).toEqual([0, false]);
	// Each of two encoder ranks takes 3 steps × 3 microbatches, and encodes none a second time.
	expect(ahead.stdout.match(/encoder prefetch rank=1 producer batch=\d encode_ms=/g)).toHaveLength(9);
	// From the second step on features wait for it.
	const ready = [...ahead.stdout.matchAll(/rank=0 consumer batch=(\d) ready_at_request=(\d)\/2/g)];
	expect(ready.filter(([, batch]) => Number(batch) % 3 === 0).map(([, , count]) => count)).toEqual(["0", "2", "2"]);
}, 60_000);

test("Hugging Face weights of several ranks are those of one", () => {
	const still = flags("--llm-only --lr 0 --min-lr 0 --moe-router-bias-update-rate 0 --train-iters 1");
	const save = (name: string, layout: string) => {
		expect(train(name, ...still, ...flags(layout), "--save-hf", name).exitCode).toBe(0);
		return readFileSync(join(folder, name, "model.safetensors"));
	};
	const one = save("whole", "--llm-offset 0");
	expect(save("parts", "--llm-tp 2 --llm-dp 2 --llm-ep 4 --global-batch-size 8").equals(one)).toBeTrue();
}, 60_000);

test("gradients reduced in buckets during backward train bit for bit what they train after it", () => {
	const layout = flags("--encoder-dp 2 --llm-dp 2 --llm-ep 2 --use-distributed-optimizer");
	const after = train("after", ...layout);
	const during = train(
		"during",
		...layout,
		...flags("--overlap-grad-reduce --encoder-ddp-overlap --ddp-bucket-size 2000"),
	);
	expect([after.exitCode, during.exitCode, during.stderr]).toEqual([0, 0, ""]);
	expect(during.steps).toHaveLength(2);
	for (const [index, step] of during.steps.entries()) {
		expect(step["lm loss"]).toBe(after.steps[index]!["lm loss"]!);
		expect(step.grad_norm).toBe(after.steps[index]!.grad_norm!);
	}
}, 60_000);

describe("captions of held-out pictures", () => {
	using scratch = new Scratch();
	const layouts = [
		["one process", "--llm-offset 0 --num-workers 2"],
		["tensor-parallel encoder, data- and expert-parallel language model", "--encoder-tp 2 --llm-dp 2 --llm-ep 2"],
		...(full
			? ([
					["two encoder lanes, two language lanes in tensor parallel", "--encoder-dp 2 --llm-dp 2 --llm-tp 2"],
				] as const)
			: []),
		["two encoder lanes of two stages, two pipelines of three", "--encoder-dp 2 --encoder-pp 2 --llm-dp 2 --llm-pp 3"],
	] as const;
	const data = captions(scratch, "captions", [20, 10, 12], "2,1,0");
	const outputs = layouts.map(([name, layout]) =>
		train(
			`captions ${name}`,
			...flags(
				"--seq-length 64 --packing-buffer-size 6 --loss-roles assistant --data-end-id 10 --num-workers 1 --vision-position-mode window",
			),
			...flags("--eval-captions 8 --eval-micro-batch-size 4 --eval-global-batch-size 8 --eval-iters 1"),
			...["--data-path", data, ...flags(layout)],
		),
	);

	test("losses, and captions read back, are the same on every layout", () => {
		for (const { exitCode, stderr, stdout, steps } of outputs) {
			expect([exitCode, stderr]).toEqual([0, ""]);
			for (const [index, step] of outputs[0]!.steps.entries()) {
				expect(Math.abs(steps[index]!["lm loss"]! / step["lm loss"]! - 1)).toBeLessThan(2e-6);
			}
			expect(stdout).toMatch(/Captions of 8 held-out pictures, decoded greedily: exactly right 0\.0 % \(2 words /);
			expect(stdout.match(/^read: .* \(it says caption \d+.*\)$/gm)).toHaveLength(3);
		}
		const read = outputs
			.slice(1)
			.map(({ stdout }) => stdout.slice(stdout.indexOf("Captions of"), stdout.indexOf("Files:")));
		expect(new Set(read).size).toBe(1);
	});

	test("the log has the first lane's samples with their pictures, the same on every layout", () => {
		const samples = outputs.map(({ log }) => readRunLog(log).samples!);
		const [{ step, sentence, records }] = samples as [LoggedSamples];
		expect([step, records.length]).toEqual([2, 8]);
		expect(sentence).toStartWith("Captions of 8 held-out pictures, decoded greedily: exactly right 0.0 %");
		for (const other of samples) {
			expect(other.records.length).toBeGreaterThanOrEqual(4);
			expect(other.records).toEqual(records.slice(0, other.records.length));
		}
		for (const { picture, truth, answer } of records) {
			expect([/^caption \d+/.test(truth), answer.length > 0]).toEqual([true, true]);
			const bytes = Buffer.from(picture!, "base64");
			expect([bytes.toString("latin1", 1, 4), Math.max(bytes.readUInt32BE(16), bytes.readUInt32BE(20)) <= 112]).toEqual(
				["PNG", true],
			);
		}
		expect(new Set(records.map(({ picture }) => picture)).size).toBe(8);
	});
});

// The training of npm start, to the end.
if (full)
	test("examples/vlm-tiny.yaml reads nine of ten single held-out digits", () => {
		const root = join(import.meta.dir, "../..");
		expect(Bun.spawnSync(["bash", "examples/digits/prepare.sh"], { cwd: root }).exitCode).toBe(0);
		const config = join(root, "examples/vlm-tiny.yaml");
		const { exitCode, stdout } = mimo(["train", "--config", config, "--log-json", join(folder, "start.jsonl")]);
		expect(exitCode).toBe(0);
		const [, right] = /exactly right [\d.]+ % \(1 word ([\d.]+) % of \d+, 2 words /.exec(stdout)!;
		expect(Number(right)).toBeGreaterThanOrEqual(90);
	}, 600_000);
