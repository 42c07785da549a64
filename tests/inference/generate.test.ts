/** `mimo generate` as a user runs it: the same answers on every layout, from checkpoints and Hugging Face folders. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { encodePng } from "../../src/data/vision-language/pixels.ts";
import { deviceFlags, executable, mimo } from "../commands/mimo.ts";
import { png, Scratch, withOrientation } from "../data/fixtures.ts";
import { parts } from "../train/restart/vision-language.ts";

const full = process.env.MIMO_TEST_FULL === "1";

const folder = new Scratch();
afterAll(() => folder[Symbol.dispose]());

const text = `--preset nemotron-tiny --hidden-size 64 --hybrid-layer-pattern ME*EM- --seq-length 64 --lr-warmup-iters 1 --train-iters 12 --init-method-std 0.1 --dataset-provider text --data-path text.txt --save text --save-interval 12 --save-hf hf ${deviceFlags}`;
const pictures = `--preset nemotron-vlm-tiny --hidden-size 64 --vision-num-layers 1 --vision-hidden-size 32 --seq-length 128 --micro-batch-size 2 --global-batch-size 8 --lr-warmup-iters 0 --train-iters 1 --init-method-std 0.1 --img-h 32 --img-w 32 --llm-offset 0 --conversation-template chatml --image-tag-type internvl --save pictures --save-interval 1 ${deviceFlags}`;

const run = (command: string, ...more: string[]) => mimo([...command.split(" "), ...more], folder.path);

beforeAll(() => {
	folder.file("text.txt", "the quick brown fox jumps over the lazy dog and runs away. ".repeat(80));
	for (const [i, name] of ["a.png", "b.png", "c.png"].entries()) folder.file(name, png(20 + 9 * i, 30 - 4 * i, i));
	folder.file(
		"strict.jinja",
		"{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}",
	);
	folder.file("endless.jinja", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}");
	for (const flags of [text, pictures]) {
		const { exitCode, stderr } = run(`train ${flags}`);
		expect([exitCode, stderr]).toEqual([0, ""]);
	}
}, 60_000);

/** Standard output of a generation that went well. */
function said(command: string, ...more: string[]): string {
	const { exitCode, stdout, stderr } = run(`generate ${deviceFlags} ${command}`, ...more);
	expect(stderr).toMatch(
		/^prefill \d+ tokens in [\d.]+ s \(\d+ tokens\/s\), decode \d+ tokens in [\d.]+ s \(\d+ tokens\/s\)\n$/,
	);
	expect(exitCode).toBe(0);
	return stdout;
}

describe("a text", () => {
	const prompt = ["--prompt", "the quick ", "--max-new-tokens", "12"];

	test("goes on the same on every layout, greedily and drawn", () => {
		const greedy = said("--load text", ...prompt);
		expect(greedy.length).toBeGreaterThan(4);
		const drawn = said("--load text --temperature 1.5 --top-p 0.95 --seed 5", ...prompt);
		expect(drawn).not.toBe(greedy);
		expect(said("--load text --temperature 1.5 --top-p 0.95 --seed 6", ...prompt)).not.toBe(drawn);
		for (const layout of ["--llm-tp 2 --llm-ep 2", "--llm-pp 2", "--llm-dp 2 --llm-ep 2"]) {
			if (full || layout === "--llm-pp 2") expect(said(`--load text ${layout}`, ...prompt)).toBe(greedy);
			expect(said(`--load text --temperature 1.5 --top-p 0.95 --seed 5 ${layout}`, ...prompt)).toBe(drawn);
		}
	}, 60_000);

	test("with multi-latent attention goes on the same on every layout, from its folder, and trains adapters of it", () => {
		folder.file("bytes.json", JSON.stringify(byteLevel()));
		const latents =
			"--hybrid-layer-pattern +-+E/+E --num-query-groups 4 --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --latent-norm-epsilon 1e-6 --no-squared-relu --swiglu";
		const training = `${text.replace("--save text", "--save latents").replace("--save-hf hf ", "")} ${latents} --train-iters 2 --save-interval 2`;
		const { exitCode, stderr } = run(`train ${training} --save-hf deepseek`);
		expect([exitCode, stderr]).toEqual([0, ""]);
		const own = said("--load latents", ...prompt);
		for (const layout of ["--llm-tp 2", "--llm-pp 2"]) expect(said(`--load latents ${layout}`, ...prompt)).toBe(own);
		expect(said("--load-hf deepseek --tokenizer bytes.json", ...prompt)).toBe(own);
		const adapters = "--load-hf deepseek --lora-rank 2 --lora-target-modules linear_q_down_proj linear_kv_up_proj";
		const tuned = run(`train ${training.replace("--save latents", "--save tuned")} ${adapters} --save-peft peft`);
		expect([tuned.exitCode, tuned.stderr]).toEqual([0, ""]);
		const { target_modules: targets } = JSON.parse(readFileSync(join(folder.path, "peft/adapter_config.json"), "utf8"));
		expect(JSON.stringify(targets)).toMatch(/q_a_proj.*kv_b_proj|kv_b_proj.*q_a_proj/);
	}, 60_000);

	test("a Hugging Face folder goes on as the checkpoint of the same weights", () => {
		folder.file("bytes.json", JSON.stringify(byteLevel()));
		const own = said("--load text", ...prompt);
		expect(said("--load-hf hf --tokenizer bytes.json", ...prompt)).toBe(own);
		expect(said("--load-hf hf --bytes", ...prompt)).toBe(own);
		const asked = run(`generate ${deviceFlags} --load-hf hf --bytes --chat`, ...prompt);
		expect(asked.stderr).toStartWith("hf has no chat template: turns are written as lines of text;");
		const untrained = run(`generate ${deviceFlags} --load-hf hf --bytes --lora-rank 2`, ...prompt);
		expect(untrained.stderr).toContain("--lora-rank asks for adapters, which a Hugging Face folder does not have");
		expect(untrained.exitCode).not.toBe(0);
	}, 30_000);
});

/** A tokenizer.json whose ids are bytes. */
function byteLevel() {
	// As GPT-2 writes bytes: those that are no visible character from U+0100 on.
	const visible = (byte: number) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
	let next = 256;
	const vocab = Object.fromEntries(
		Array.from({ length: 256 }, (_, byte) => [String.fromCodePoint(visible(byte) ? byte : next++), byte]),
	);
	const level = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false };
	return {
		version: "1.0",
		added_tokens: [],
		normalizer: null,
		pre_tokenizer: level,
		post_processor: null,
		decoder: level,
		model: { type: "BPE", vocab, merges: [], unk_token: null },
	};
}

test("a picture file is turned by its EXIF orientation, with Energon's decoding it is not", () => {
	// Dark above, bright below.
	const pixels = Uint8Array.from({ length: 3 * 32 * 32 }, (_, i) => (i < 1536 ? 0 : 200) + ((i * 31) % 55));
	const quarter = Uint8Array.from(pixels, (_, i) => {
		const [channel, x, y] = [i % 3, Math.floor(i / 3) % 32, Math.floor(i / 96)];
		return pixels[((31 - x) * 32 + y) * 3 + channel]!;
	});
	const file = (name: string, of: Uint8Array, orientation: number) => {
		const stored = encodePng({ width: 32, height: 32, channels: 3, pixels: of });
		folder.file(name, withOrientation(stored, orientation));
		return name;
	};
	const [turned, upright] = [file("turned.png", pixels, 6), file("upright.png", quarter, 1)];
	const stored = file("stored.png", pixels, 1);
	const answer = (image: string, ...flags: string[]) =>
		said(
			"--load pictures --max-new-tokens 40 --temperature 2 --seed 4",
			...["--prompt", "<image>?", "--image", image, ...flags],
		);
	expect(answer(turned)).toBe(answer(upright));
	expect(answer(turned, "--image-decoding", "energon")).toBe(answer(stored));
	expect(answer(stored)).not.toBe(answer(upright));
}, 60_000);

describe("records with and without images", () => {
	const records = [
		{ id: "x", messages: [{ role: "user", content: "<image> what is it?" }], images: ["a.png"] },
		{ prompt: "no picture" },
		{ messages: [{ role: "user", content: [{ type: "image" }, { type: "text", text: "?" }] }], images: ["b.png"] },
		{ prompt: "two <image> and <image>", images: ["c.png", "a.png"] },
		{ prompt: "c" },
	];
	const input = () => folder.file("in.jsonl", `${records.map((record) => JSON.stringify(record)).join("\n")}\n`);

	test("are answered the same on every layout and in batches of any size", () => {
		input();
		const flags = "--load pictures --input in.jsonl --max-new-tokens 5 --seed 3 --temperature 2";
		const one = said(flags);
		const lines = one
			.trim()
			.split("\n")
			.map((line) => JSON.parse(line));
		expect(lines.map(({ tokens }) => tokens)).toEqual([5, 5, 5, 5, 5]);
		expect(lines.map(({ id }) => id)).toEqual(["x", undefined, undefined, undefined, undefined]);
		expect(new Set(lines.map(({ text: own }) => own)).size).toBeGreaterThan(2);
		for (const layout of [
			"--batch-size 2",
			"--encoder-tp 2 --llm-tp 2 --llm-ep 2 --llm-offset 2",
			"--llm-offset 0 --encoder-dp 2 --llm-pp 2",
			...(full
				? [
						"--llm-offset 1",
						"--encoder-dp 2 --llm-offset 2 --batch-size 3",
						"--llm-dp 2 --llm-ep 2 --llm-offset 1 --batch-size 2",
					]
				: []),
		]) {
			expect([layout, said(`${flags} ${layout}`)]).toEqual([layout, one]);
		}
	}, 90_000);

	test("go to a new file", () => {
		input();
		expect(said("--load pictures --input in.jsonl --output out.jsonl --max-new-tokens 2")).toBe("");
		expect(readFileSync(join(folder.path, "out.jsonl"), "utf8").trim().split("\n")).toHaveLength(5);
		const again = run("generate --load pictures --input in.jsonl --output out.jsonl");
		expect([again.exitCode, again.stderr]).toEqual([1, "mimo: --output out.jsonl exists already: name a new file.\n"]);
	}, 30_000);
});

test("--json prints every answer as a line with its prompt, counts and how it ended", () => {
	const prompt = ["--prompt", "the quick ", "--max-new-tokens", "12"];
	const plain = said("--load text", ...prompt);
	const answer = { prompt: "the quick ", text: plain.slice(0, -1), prompt_tokens: 10, tokens: 12, end: "length" };
	for (const layout of ["", " --llm-pp 2"]) {
		const lines = said(`--load text --json${layout}`, ...prompt);
		expect([layout, lines]).toEqual([layout, `${JSON.stringify(answer)}\n`]);
	}
	// The token that ended an answer does not count.
	const end = plain.charCodeAt(3);
	const stopped = JSON.parse(said(`--load text --json --data-end-id ${end}`, ...prompt));
	expect(stopped).toMatchObject({ text: plain.slice(0, plain.indexOf(plain[3]!)), end: "end token" });
	expect(stopped.tokens).toBe(stopped.text.length);
	const turns = [{ role: "user", content: "why" }];
	const records = [{ id: 7, prompt: "In" }, { messages: turns }];
	folder.file("asked.jsonl", records.map((record) => JSON.stringify(record)).join("\n"));
	const lines = said("--load pictures --input asked.jsonl --json --max-new-tokens 2").trim().split("\n");
	expect(lines.map((line) => JSON.parse(line))).toMatchObject([
		{ id: 7, prompt: "In", prompt_tokens: 2, tokens: 2 },
		{ prompt: turns, tokens: 2 },
	]);
	const conversation = Bun.spawnSync(
		[executable, ...`generate --load text --chat --json --max-new-tokens 3 ${deviceFlags}`.split(" ")],
		{ cwd: folder.path, stdin: Buffer.from("hi\nwhy\n"), stdout: "pipe", stderr: "pipe" },
	);
	const answers = conversation.stdout.toString().trim().split("\n");
	expect(answers.map((line) => JSON.parse(line).prompt)).toEqual(["hi", "why"]);
}, 60_000);

test("a conversation: every line of standard input is answered", () => {
	const { stdout, exitCode, stderr } = Bun.spawnSync(
		// How ranks talk chooses no grid: it stays one process.
		[
			executable,
			...`generate --load pictures --chat --max-new-tokens 3 ${deviceFlags} --distributed-backend shm`.split(" "),
		],
		{ cwd: folder.path, stdin: Buffer.from("hi\nwhy\n"), stdout: "pipe", stderr: "pipe" },
	);
	expect([exitCode, stdout.toString().split("\n").length]).toEqual([0, 3]);
	// Each pass reads all that was said: the second one more than twice as much.
	const read = [...stderr.toString().matchAll(/prefill (\d+) tokens/g)].map(([, count]) => Number(count));
	expect(read).toHaveLength(2);
	expect(read[1]!).toBeGreaterThan(read[0]!);
}, 30_000);

describe("a vision-language model of Hugging Face", () => {
	const { language, tower, projector } = parts;
	const asked = ["--chat", "--image", "a.png", "--prompt", "What is it?", "--max-new-tokens", "6"];
	const apart = `--load-hf ${language} --load-vision ${tower} --load-projector ${projector}`;

	test("of three folders, of one, and of the checkpoint of the same weights", () => {
		const still = `--seq-length 64 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0 ${deviceFlags}`;
		const kept = `--moe-router-bias-update-rate 0 --llm-offset 0 --conversation-template jinja ${still}`;
		const { exitCode } = run(`train ${apart} ${kept} --save-hf joined --save kept --save-interval 1`);
		expect(exitCode).toBe(0);
		const own = said(apart, ...asked);
		expect(own.length).toBeGreaterThan(1);
		expect(said("--load-hf joined", ...asked)).toBe(own);
		expect(said("--load kept", ...asked)).toBe(own);
		expect(said("--load-hf joined --encoder-tp 2 --llm-tp 2 --llm-ep 2", ...asked)).toBe(own);
	}, 60_000);

	test("without its projector is refused", () => {
		const { exitCode, stderr } = run(`generate --load-hf ${language} --load-vision ${tower}`, ...asked);
		expect([exitCode, stderr]).toEqual([
			1,
			`mimo: ${language} (load-hf) holds no projector, and none is named: --load-projector names one, or \`mimo train\` trains a new one.\n`,
		]);
	});
});

describe("is refused in a sentence", () => {
	test.each([
		["no weights", "", /^mimo: The weights have to be named: --load with .*--load-hf with a Hugging Face folder\.\n$/],
		["nothing to do", "--load text", /^mimo: mimo generate needs --prompt TEXT, --chat or --input FILE\.jsonl\.\n$/],
		["no checkpoint", "--load nothing --prompt a", /^mimo: nothing \(load\) is no checkpoint\.\n$/],
		[
			"a folder of another kind",
			"--load hf --prompt a",
			/^mimo: hf \(load\) is a Hugging Face folder; --load-hf takes those\.\n$/,
		],
		[
			"no tokenizer",
			"--load-hf hf --prompt a",
			/^mimo: hf \(load-hf\) has no tokenizer\.json: --tokenizer names the model's, and --bytes .*\.\n$/,
		],
		[
			"a prompt that is too long",
			`--load text --prompt ${"a".repeat(70)}`,
			/^mimo: The prompt has 70 tokens, which leaves no room for an answer among the 64 positions of the model \(--max-position-embeddings\)\.\n$/,
		],
		[
			"an answer that is too long",
			"--load text --prompt abc --max-new-tokens 62",
			/^mimo: The prompt has 3 tokens and is to get 62 more: together more than the 64 positions of the model/,
		],
		[
			"an image for a model of text",
			"--load text --prompt a --image a.png",
			/^mimo: The prompt has the image a\.png, but the model reads text alone: it has no vision encoder\.\n$/,
		],
		[
			"an image that is not there",
			"--load pictures --prompt a --image z.png",
			/^mimo: Cannot open the image z\.png of the prompt: it does not exist\.\n$/,
		],
		[
			"an image that is none",
			"--load pictures --prompt a --image text.txt",
			/^mimo: The image text\.txt of the prompt: .*\n$/,
		],
		[
			"top-p without temperature",
			"--load text --prompt a --top-p 0.5",
			/^mimo: --top-k and --top-p need --temperature above 0: /,
		],
		[
			"a temperature below 0",
			"--load text --prompt a --temperature=-1",
			/^mimo: --temperature is "-1"; allowed is a number from 0\.\n$/,
		],
		[
			"a turn that the chat template refuses",
			"--load text --conversation-template jinja --chat-template strict.jinja --chat --prompt a --system b",
			/^mimo: The prompt cannot be continued: strict\.jinja, line 1, refuses its turn 1 \(system\): "System role not supported"\.\n$/,
		],
		[
			"the same template for a checkpoint that was trained without one",
			"--load text --chat-template strict.jinja --chat --prompt a --system b",
			/^mimo: The prompt cannot be continued: strict\.jinja, line 1, refuses its turn 1 \(system\): /,
		],
		[
			"a chat template that would have no effect",
			"--load text --conversation-template plain --chat-template strict.jinja --chat --prompt a",
			/^mimo: --conversation-template: the value is "plain"; allowed with chat-template is jinja\.\n$/,
		],
		[
			"a chat template without an end",
			"--load text --conversation-template jinja --chat-template endless.jinja --chat --prompt a",
			/^mimo: The chat template endless\.jinja takes more than 5,000,000 steps, the bound of a rendering\.\n$/,
		],
		[
			"another model",
			"--load text --prompt a --hidden-size 32",
			/holds another model: --hidden-size is 64 there and 32 here/,
		],
	] as const)("%s", (_, flags, sentence) => {
		const { exitCode, stdout, stderr } = run(`generate ${deviceFlags}`, ...flags.split(" ").filter(Boolean));
		expect(stderr).toMatch(sentence);
		expect([exitCode > 0, stdout]).toEqual([true, ""]);
	});

	test.each([
		["a line that is not JSON", '{"prompt": "a"}\n{"prompt": \n', /^mimo: bad\.jsonl, line 2 is not JSON: .*\n$/],
		["a line that is no object", "[1]\n", /^mimo: bad\.jsonl, line 1 is no JSON object\.\n$/],
		["a record without a prompt", '{"a": 1}\n', /^mimo: bad\.jsonl, line 1 has neither a prompt nor messages\.\n$/],
		["no records", "\n\n", /^mimo: bad\.jsonl has no records\.\n$/],
		[
			"a turn that the template of the model does not know",
			'{"messages": [{"role": "narrator", "content": "a"}]}\n',
			/^mimo: bad\.jsonl, line 1 cannot be continued: its conversation has a turn of "narrator"; speakers of \w+ are system, user, assistant; .*\n$/,
		],
		[
			"more tags than images",
			'{"messages": [{"role": "user", "content": "<image>"}]}\n',
			/^mimo: bad\.jsonl, line 1: it has 1 <image> tag and 0 images; `images` lists their files\.\n$/,
		],
	] as const)("%s, on any layout", (_, content, sentence) => {
		folder.file("bad.jsonl", content);
		for (const layout of [[], ["--llm-tp", "2", "--llm-ep", "2"]]) {
			const { exitCode, stdout, stderr } = run(`generate --load text --input bad.jsonl ${deviceFlags}`, ...layout);
			expect(stderr).toMatch(sentence);
			expect([exitCode, stdout]).toEqual([1, ""]);
		}
	});
});
