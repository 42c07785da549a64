/** Megatron's indexed text beside pictures: McoreBlend inside of a metadataset, as the Nemotron branch's production blend has it. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { IndexedWriter } from "../../src/data/megatron/indexed-file.ts";
import { deviceFlags, mimo } from "../commands/mimo.ts";
import { captions, Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const class_ = (name: string) => `__module__: megatron.energon\n__class__: ${name}\n`;
beforeAll(() => {
	captions(scratch, "pictures", [17, 9, 12], "2,1,0");
	for (const [name, step] of [
		["doc", 3],
		["other", 5],
	] as const) {
		using writer = new IndexedWriter(join(scratch.path, name), 256);
		for (let document = 0; document < 30; document++) {
			const length = 5 + ((document * 37) % 150);
			const ids = Int32Array.from({ length }, (_, t) => 97 + ((document + step * t) % 24));
			writer.add(ids, [length]);
		}
		writer.finish();
	}
	scratch.file("text/blend.json", JSON.stringify({ train: ["0.7", "../doc", "0.3", "../other.bin"], valid: [] }));
	scratch.file("text/wrap.yaml", `${class_("McoreBlend")}mcore_json: ./blend.json\n`);
	const entry = (weight: number, path: string) => `      - weight: ${weight}\n        path: ${path}\n`;
	const blend = `splits:\n  train:\n    blend:\n${entry(0.6, "./text/wrap.yaml")}${entry(0.4, "./pictures")}`;
	scratch.file("blend.yaml", class_("MetadatasetV2") + blend);
});

const common = [
	...["--preset", "nemotron-vlm-tiny", "--data-path", "blend.yaml", "--seq-length", "64", "--lr-decay-iters", "8"],
	...["--micro-batch-size", "1", "--global-batch-size", "4", "--lr-warmup-iters", "1", "--log-interval", "1"],
	...["--packing-buffer-size", "6", "--shuffle-buffer-size", "4", "--data-end-id", "10", "--data-threads", "1"],
	...["--hidden-size", "32", "--mamba-num-heads", "2", "--vision-hidden-size", "32", "--threads", "1"],
	...["--encoder-dp", "2", "--llm-dp", "2", ...deviceFlags.split(" ")],
];

interface Line {
	readonly "lm loss"?: number;
}

function train(name: string, ...flags: string[]) {
	const { exitCode, stderr } = mimo(["train", ...common, "--log-json", `${name}.jsonl`, ...flags], scratch.path);
	expect([name, exitCode, exitCode === 0 ? "" : stderr]).toEqual([name, 0, ""]);
	const lines = readFileSync(join(scratch.path, `${name}.jsonl`), "utf8")
		.trim()
		.split("\n")
		.map((line) => JSON.parse(line) as Line);
	return lines.filter((line) => line["lm loss"] !== undefined);
}
const losses = (lines: readonly Line[]) => lines.map((line) => line["lm loss"]);

test("text and pictures are trained on in one order, which a resumed run goes on with", () => {
	const policy = ["--encoder-grad-participation", "corrected"];
	const whole = train("whole", "--train-iters", "4", ...policy);
	expect(losses(whole)).toHaveLength(4);
	const save = ["--save", "checkpoints", "--save-interval", "2"];
	expect(losses(train("begun", "--train-iters", "2", ...policy, ...save))).toEqual(losses(whole).slice(0, 2));
	const rest = train("resumed", "--train-iters", "4", ...policy, "--load", "checkpoints");
	expect(losses(rest)).toEqual(losses(whole).slice(2));
}, 60_000);
