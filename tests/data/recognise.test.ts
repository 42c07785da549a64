/** Paths that are not data sets, and files that are not text: refused by name, with the way that exists. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { fileKind } from "../../src/config/file-kind.ts";
import { resolveConfiguration } from "../../src/config/resolve.ts";
import { checkData } from "../../src/data/check.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { lint, type Problem } from "../../src/data/energon/tools/lint.ts";
import { readTokens } from "../../src/data/text/token-source.ts";
import { byteTokenizer } from "../../src/data/text/tokenizer.ts";
import { captions, png, Scratch, tar } from "./fixtures.ts";

let scratch: Scratch;
beforeAll(() => {
	scratch = new Scratch();
	captions(scratch, "set", [3, 2], "8,2,0");
});
afterAll(() => scratch[Symbol.dispose]());

const configuration = (preset: string, path: string, ...flags: string[]) =>
	resolveConfiguration(["--preset", preset, "--data-path", path, ...flags], {}).configuration;
const check = (preset: string, path: string, ...flags: string[]) => checkData(configuration(preset, path, ...flags));
const vlm = (path: string, ...flags: string[]) => check("nemotron-vlm-tiny", path, ...flags);
const text = (path: string, ...flags: string[]) => check("nemotron-tiny", path, ...flags);

describe("formats are known by their bytes, whatever their name", () => {
	const riff = (kind: string) => Buffer.from(`RIFF\x10\0\0\0${kind}`);
	const tarBytes = tar([["a.txt", "x"]]);
	for (const [name, bytes] of [
		["a Parquet file", Buffer.from("PAR1\x15\0")],
		["a gzip file", gzipSync("x")],
		["a zip file", Buffer.from("PK\x03\x04")],
		["a tar file", tarBytes],
		["a PNG image", png(2, 2)],
		["a WebP image", riff("WEBP")],
		["an MP4 video", Buffer.from("\0\0\0\x20ftypisom")],
		["an SQLite database", Buffer.from("SQLite format 3\0")],
		["a NumPy file", Buffer.from("\x93NUMPY", "latin1")],
		["a PDF file", Buffer.from("%PDF-1.7\n")],
	] as const) {
		test(name, () => {
			const path = scratch.file("data.txt", bytes);
			expect(fileKind(path)).toEqual({ name, isText: false });
			expect(() => text(path)).toThrow(name === "a tar file" ? "is one tar file" : `${path} is ${name}`);
			expect(() => text(path, "--dataset-provider", "text")).toThrow(`${path} is ${name}`);
			expect(() => readTokens(path, byteTokenizer)).toThrow(`${path} is ${name}, not text`);
		});
	}

	test("text that resembles a format is text", () => {
		for (const words of ["THE NEW WAVE is here", "ID3 tags", "II* what", "GIF8 is", "BZh", ""]) {
			expect(fileKind(scratch.file("words.md", words))).toBeNull();
		}
	});
});

describe("a vision-language run", () => {
	for (const [name, content, message] of [
		["data.csv", "image,caption\n0.png,a\n", "is a CSV file; `mimo data import "],
		["data.json", "[]", "is a JSON file; `mimo data import "],
		["data.parquet", "anything", "is a Parquet file; `mimo data import "],
		["data.tar", tar([["a.txt", "x"]]), "is one tar file: put it into a folder of its own"],
		["notes.txt", "only words", "is a file of text, not of samples with images"],
		["hf/state.json", '{"_data_files": [{"filename": "a.arrow"}]}', "is a Hugging Face data set; `mimo data import "],
		["parquet/train-0.parquet", "PAR1", "is a folder of Parquet files; `mimo data import "],
		["pictures/a.png", "", "is a folder of images; `mimo data import "],
		["facts.jsonl", '{"text": "a"}\n', "has no index: run `mimo data prepare"],
		["tars/0.tar", tar([["a.txt", "x"]]), "is not a prepared data set: run `mimo data prepare"],
	] as const) {
		test(`does not train on the bytes of ${name}`, () => {
			const file = scratch.file(`vlm/${name}`, content);
			const path = name.includes("/") ? join(file, "..") : file;
			expect(() => vlm(path)).toThrow(message);
			const fix = /prepare/.test(message);
			if (fix) return;
			expect(() => vlm(path)).not.toThrow("run `mimo data prepare` first");
			if (name.includes("/")) expect(() => prepare(path, { ...defaultPrepareOptions, splitRatio: "1,0,0" })).toThrow();
		});
	}

	test("reads text if the flag requests it", () => {
		expect(configuration("nemotron-vlm-tiny", scratch.file("a.txt", "words")).datasetProvider).toBe("energon");
		expect(() => vlm(scratch.file("words.csv", "a,b"), "--dataset-provider", "text")).not.toThrow();
	});

	test("names a missing path", () => expect(() => vlm(join(scratch.path, "no"))).toThrow("no does not exist"));
});

describe("a language run", () => {
	test("reads text, and refuses tables, other encodings and missing paths", () => {
		for (const name of ["a.txt", "b.md", "LICENSE", "c.py"])
			expect(() => text(scratch.file(name, "ünïcode"))).not.toThrow();
		expect(() => text(scratch.file("t.csv", "a,b\n"))).toThrow("is a CSV file");
		expect(() => text(scratch.file("t.json", "[]"))).toThrow("is a JSON file");
		const latin = scratch.file("latin.txt", Buffer.from("caf\xe9", "latin1"));
		expect(() => readTokens(latin, byteTokenizer)).toThrow("is not text in UTF-8");
		expect(() => text(join(scratch.path, "no.txt"))).toThrow("no.txt does not exist");
	});
});

describe("JSONL records that name media", () => {
	const cases = [
		['{"image": "images/0.png", "caption": "a red circle"}', 'its field image names "images/0.png"'],
		['{"images": ["a.png"], "messages": []}', 'its field images names "a.png"'],
		['{"conversations": [{"from": "human", "value": "<image> what?"}]}', "its text has <image>"],
		[
			'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
			"its text has <image>",
		],
		['{"video": "a.mp4", "text": "x"}', 'its field video names "a.mp4", and video is not built yet'],
		['{"audio": "a.wav", "text": "x"}', 'its field audio names "a.wav", and audio is not built yet'],
	] as const;
	for (const [record, message] of cases) {
		test(`${record.slice(0, 40)} is refused by lint and train, and said by prepare`, () => {
			const path = scratch.file("media.jsonl", `{"text": "fine"}\n${record}\n`);
			const said: string[] = [];
			const preparing = () => prepare(path, { ...defaultPrepareOptions, report: (line) => said.push(line) });
			if (/video|audio/.test(record)) expect(preparing).toThrow(`${path}, record 1: ${message}`);
			else {
				preparing();
				expect(said.join()).toStartWith(`warning: ${path}, record 1: ${message}`);
				expect(said.join()).toContain(`\`mimo data import ${path} --output `);
			}
			// As Energon's own prepare leaves it.
			const plain = scratch.file(
				"plain.jsonl",
				`{"text": "fine"}\n${JSON.stringify({ text: "x".repeat(record.length - 11) })}\n`,
			);
			prepare(plain, defaultPrepareOptions);
			scratch.file("media.jsonl.idx", readFileSync(join(scratch.path, "plain.jsonl.idx")));
			expect(() => vlm(path)).toThrow(message);
			expect(() => text(path)).toThrow(message);
			const found: Problem[] = [];
			lint(new LocalStorage(), path, { images: () => null, check: null }, (problem) => found.push(problem));
			expect(found.map(({ key, what }) => [key, what.includes(message)])).toEqual([["1", true]]);
		});
	}

	test("records of text alone are accepted", () => {
		const path = scratch.file(
			"talk.jsonl",
			'{"image": null, "images": [], "text": "An <img> tag of HTML, and 1 < 2"}\n',
		);
		prepare(path, defaultPrepareOptions);
		expect(() => vlm(path)).not.toThrow();
	});
});

describe("before the first step", () => {
	test("missing auxiliary data are named", () => {
		const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n";
		const path = scratch.file("aux.yaml", `${head}    path: set\n    aux: {images: filesystem://images}\n`);
		expect(() => vlm(path)).toThrow(/aux images: the folder .*images does not exist/);
	});

	test("the validation part is opened if the run evaluates", () => {
		const set = captions(scratch, "noval", [3]);
		expect(() => vlm(set)).not.toThrow();
		expect(() => vlm(set, "--eval-iters", "1")).toThrow("The split part val of ");
		expect(() => vlm(join(scratch.path, "set"), "--eval-iters", "1", "--eval-micro-batch-size", "2")).not.toThrow();
	});

	test("an image token that is text of the tokenizer", () => {
		const vocab = Object.fromEntries([..."abcdef"].map((letter, id) => [letter, id]));
		const added = [{ id: 6, content: "<image>", special: true, normalized: false, lstrip: false, rstrip: false }];
		const file = { added_tokens: added, normalizer: null, pre_tokenizer: null, post_processor: null, decoder: null };
		const path = scratch.file(
			"tok/tokenizer.json",
			JSON.stringify({ ...file, model: { type: "BPE", vocab, merges: [] } }),
		);
		const run = (id: number) => () =>
			vlm(join(scratch.path, "set"), "--tokenizer", path, "--image-token-id", String(id));
		expect(run(2)).toThrow('--image-token-id 2 is the ordinary token "c" of ');
		expect(run(6)).not.toThrow();
		expect(run(400)).not.toThrow();
	});
});

test("the message about a blend without the lines of a MetadatasetV2 has these lines", () => {
	const blend = scratch.file("blend.yaml", "splits:\n  train:\n    blend:\n      - {path: ./set}\n");
	expect(() => vlm(blend)).toThrow(
		/^split train of \S*blend\.yaml has keys of a MetadatasetV2, so the file has to begin with the lines "__module__: megatron\.energon" and "__class__: MetadatasetV2"\.$/,
	);
});
