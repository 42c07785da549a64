/** Megatron's indexed text beside pictures: McoreBlend inside of a metadataset, as the Nemotron branch's production blend has it. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
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
	const save = ["--save", "checkpoints", "--save-interval", "2"];
	const whole = train("whole", "--train-iters", "4", ...policy, ...save);
	expect(losses(whole)).toHaveLength(4);
	const rest = train("resumed", "--train-iters", "4", ...policy, "--load", "checkpoints", "--ckpt-step", "2");
	expect(losses(rest)).toEqual(losses(whole).slice(2));
}, 60_000);

/** Sizes of the branch's production run made small, and as many ranks and samples. */
const small = {
	...{ "encoder-dp": 1, "llm-offset": 1, "llm-dp": 2, "llm-ep": 2, "llm-expt-dp": 2, "global-batch-size": 4 },
	...{ "num-microbatches": 2, "train-samples": 8, "lr-warmup-samples": 2, "lr-decay-samples": 8 },
	...{ "lr-wsd-decay-samples": 4, "save-interval": 2, "vocab-size": 512 },
};
const model = {
	...{ "hybrid-layer-pattern": "MEM*E", "seq-length": 64, "hidden-size": 32, "num-attention-heads": 4 },
	...{ "num-query-groups": 2, "kv-channels": 8, "ffn-hidden-size": 32, "moe-ffn-hidden-size": 16 },
	...{ "moe-shared-expert-intermediate-size": 16, "num-experts": 8, "moe-router-topk": 2, "mamba-num-heads": 4 },
	...{ "mamba-head-dim": 8, "mamba-num-groups": 2, "mamba-state-dim": 8, "max-position-embeddings": 64 },
	...{ "vision-num-layers": 2, "vision-hidden-size": 32, "vision-num-attention-heads": 4, "img-h": 32, "img-w": 32 },
};

test("the branch's production command line trains on its kind of data; MIMO_TEST_FULL=1: from its kind of checkpoint too", () => {
	mkdirSync(join(scratch.path, "tok"));
	// A byte a token, and special tokens.
	const vocab = Object.fromEntries(Array.from({ length: 256 }, (_, id) => [byteText(id), id]));
	const added = ["<|im_end|>", "<image>", "<img>", "</img>"].map((content, i) => ({
		id: 256 + i,
		content,
		special: true,
	}));
	const bytes = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
	const fields = { version: "1.0", normalizer: null, pre_tokenizer: bytes, post_processor: null, decoder: bytes };
	const tokenizer = { ...fields, added_tokens: added, model: { type: "BPE", vocab, merges: [] } };
	writeFileSync(join(scratch.path, "tok/tokenizer.json"), JSON.stringify(tokenizer));
	const template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}";
	const settings = { chat_template: template, eos_token: "<|im_end|>" };
	writeFileSync(join(scratch.path, "tok/tokenizer_config.json"), JSON.stringify(settings));
	const text = readFileSync(join(import.meta.dir, "../config/upstream/branch-33-nodes.txt"), "utf8");
	const words = text.replace(/^#.*/gm, "").replaceAll('"', "").trim().split(/\s+/);
	for (const [flag, value] of Object.entries(small)) {
		expect(words).toContain(`--${flag}`);
		words[words.indexOf(`--${flag}`) + 1] = String(value);
	}
	const sizes = Object.entries(model).flatMap(([flag, value]) => [`--${flag}`, String(value)]);
	const run = (line: readonly string[]) => {
		const device = ["--threads", "1", ...deviceFlags.split(" ")];
		const { exitCode, stdout, stderr } = mimo(["train", ...line, ...sizes, ...device], scratch.path);
		expect([exitCode, exitCode === 0 ? "" : stderr]).toEqual([0, ""]);
		return [...stdout.matchAll(/lm loss: (\S+)/g)].map(([, loss]) => Number(loss));
	};
	const from = words.indexOf("--load-nemotron-checkpoint");
	const first = run(words.toSpliced(from, 2));
	expect(first).toHaveLength(2);
	if (process.env.MIMO_TEST_FULL !== "1") return;
	const converted = mimo(["convert-ckpt", "--to", "torch_dist", "ck", words[from + 1]!], scratch.path);
	expect([converted.exitCode, converted.stderr]).toEqual([0, ""]);
	const second = run([...words, "--save-over"]);
	expect(second[0]!).toBeLessThan(first[0]!);
}, 120_000);

/** The character that stands for a byte in a byte-level vocabulary. */
function byteText(byte: number): string {
	const printed = (one: number) => (one > 32 && one < 127) || (one > 160 && one < 256 && one !== 173);
	if (printed(byte)) return String.fromCharCode(byte);
	return String.fromCharCode(256 + Array.from({ length: byte }, (_, one) => one).filter((one) => !printed(one)).length);
}
