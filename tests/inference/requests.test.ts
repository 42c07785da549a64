/** Files of requests: any number of records, one in memory at a time; long lines, pipes and devices are refused. */
import { afterAll, describe, expect, test } from "bun:test";
import { cpSync, readFileSync, truncateSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { roomForAnswers } from "../../src/inference/generate.ts";
import { RequestReader, readJsonl, requestOf } from "../../src/inference/requests.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { Scratch } from "../data/fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const flags = "--preset nemotron-tiny --vocab-size 512 --data-path a.txt --seq-length 64 --train-iters 1";
const { configuration } = resolveConfiguration(`${flags} --lr-warmup-iters 0`.split(" "));

test("a million prompts leave the room that the longest leaves", async () => {
	const reader = new RequestReader(configuration, new Images(await openLibrary("cpu")), true);
	const read = (prompt: string) => reader.read(requestOf({ name: "it", record: { prompt } }, "in.jsonl", false));
	const [short, long] = [read("a"), read("a".repeat(50))];
	const prompts = function* () {
		for (let i = 0; i < 1_000_000; i++) yield i === 999_999 ? long : short;
	};
	expect(roomForAnswers(reader, prompts, { maxNewTokens: null })).toEqual({ count: 1_000_000, most: 14 });
	expect(() => roomForAnswers(reader, prompts, { maxNewTokens: 15 })).toThrow("it has 50 tokens and is to get 15 more");
});

describe("a folder's tokenizer", () => {
	const chat = join(import.meta.dir, "../golden/chat");
	const folder = join(scratch.path, "model");
	const tokens = [{ SpecialToken: { id: "<s>", type_id: 0 } }, { Sequence: { id: "A", type_id: 0 } }];
	const beginning = { "<s>": { id: "<s>", ids: [0], tokens: ["<s>"] } };
	cpSync(join(chat, "tokenizer"), folder, { recursive: true });
	const file = JSON.parse(readFileSync(join(folder, "tokenizer.json"), "utf8"));
	file.post_processor = { type: "TemplateProcessing", single: tokens, pair: tokens, special_tokens: beginning };
	writeFileSync(join(folder, "tokenizer.json"), JSON.stringify(file));
	writeFileSync(join(folder, "generation_config.json"), '{"eos_token_id": [1, 4]}');
	const template = join(chat, "templates/chatml.jinja");
	const readerOf = async (...more: string[]) => {
		const given = `--preset nemotron-tiny --vocab-size 2048 --data-path a.txt --train-iters 1 --tokenizer ${folder}`;
		const { configuration: c } = resolveConfiguration([...given.split(" "), ...more]);
		return new RequestReader(c, new Images(await openLibrary("cpu")), false);
	};

	test("begins a text with its token, as transformers does, and leaves a chat template's text alone", async () => {
		const read = async (inChat: boolean, ...more: string[]) => {
			const reader = await readerOf(...more);
			const ids = reader.read(requestOf({ name: "it", record: { prompt: "Hi" } }, "in.jsonl", inChat)).ids;
			return [ids[0], reader.tokenizer.decode(ids)];
		};
		expect(await read(false)).toEqual([0, "<s>Hi"]);
		expect(await read(false, "--data-begin-id", "2")).toEqual([2, "<unk>Hi"]);
		expect(await read(false, "--tokenizer-type", "MultimodalTokenizer")).not.toContain(0);
		expect(await read(true, "--chat-template", template)).toEqual([
			3,
			expect.stringMatching(/^<\|im_start\|>user\nHi/),
		]);
	});

	test("ends answers of a checkpoint of ours too at every token of its generation_config.json", async () => {
		expect((await readerOf()).endIds.toSorted()).toEqual([1, 4]);
	});
});

test("a million records are read in the memory of a few", () => {
	const path = scratch.file("many.jsonl", '{"prompt": "a"}\n'.repeat(1_000_000));
	const program = `
		import { readJsonl } from "${join(import.meta.dir, "../../src/inference/requests.ts")}";
		let count = 0;
		for (const { record } of readJsonl(process.argv[1])) count += record.prompt.length;
		console.log(JSON.stringify({ count, peak: process.resourceUsage().maxRSS * 1024 }));
	`;
	const { stdout } = Bun.spawnSync([process.execPath, "-e", program, path]);
	const { count, peak } = JSON.parse(stdout.toString());
	expect(count).toBe(1_000_000);
	expect(peak).toBeLessThan(2 ** 28);
}, 60_000);

test("a line without an end, a pipe and a device are refused by name", () => {
	const all = (path: string) => () => [...readJsonl(path)];
	const path = scratch.file("long.jsonl", '{"prompt": "a"}\n');
	truncateSync(path, 3e8);
	expect(all(path)).toThrow(`${path}, line 2 has more than 16777216 bytes.`);
	writeFileSync(path, `{"prompt": ${"[".repeat(500_000)}\n`);
	expect(all(path)).toThrow(`${path}, line 1 is nested more than 64 levels deep.`);
	writeFileSync(path, '{"prompt": "the last line has no end"}');
	expect(all(path)()).toEqual([{ name: `${path}, line 1`, record: { prompt: "the last line has no end" } }]);
	const pipe = join(scratch.path, "pipe");
	Bun.spawnSync(["mkfifo", pipe]);
	for (const other of [pipe, "/dev/zero"])
		expect(all(other)).toThrow(`Cannot open ${other}: it is not a regular file.`);
	expect(all(scratch.path)).toThrow(`Cannot open ${scratch.path}: it is a folder.`);
});
