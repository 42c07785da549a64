/** Tokenizers by Megatron's names: the ids that its libraries give (tests/reference/tokenizer_references.py). */
import { afterAll, describe, expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { configurationOf } from "../../src/config/resolve.ts";
import type { Key } from "../../src/config/schema.ts";
import { configuredTokenizer, readVocabularySize } from "../../src/data/text/configured-tokenizer.ts";
import { Scratch } from "./fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const golden = process.env.MIMO_TOKENIZER_REFERENCES ?? join(import.meta.dir, "../golden/tokenizers");
const files: Record<string, string> = {};
for (const name of readdirSync(golden)) {
	const bytes = Bun.zstdDecompressSync(readFileSync(join(golden, name)));
	files[name.slice(0, -4)] = scratch.file(name.slice(0, -4), bytes);
}
const results = JSON.parse(readFileSync(files["results.json"]!, "utf8")) as {
	readonly texts: readonly string[];
	readonly ids: Readonly<Record<string, readonly number[][]>>;
	readonly decoded: Readonly<Record<string, readonly string[]>>;
};

type Values = Partial<Record<Key, unknown>>;
const tiktoken = (pattern: string): Values => ({
	"tokenizer-type": "TikTokenizer",
	tokenizer: files["tiktoken.json"],
	"tiktoken-pattern": pattern,
	"tiktoken-num-special-tokens": 20,
	"vocab-size": 700,
});
const sentencePiece = (name: string, type = "SentencePieceTokenizer"): Values => ({
	"tokenizer-type": type,
	tokenizer: files[`${name}.model`],
});
const gpt2: Values = {
	"tokenizer-type": "GPT2BPETokenizer",
	"vocab-file": files["vocab.json"],
	"merge-file": files["merges.txt"],
};
const hf: Values = { "tokenizer-type": "HuggingFaceTokenizer", tokenizer: files["tokenizer.json"] };
const kinds: Readonly<Record<string, Values>> = {
	"unigram-nfkc": sentencePiece("unigram-nfkc"),
	"unigram-bytes": sentencePiece("unigram-bytes", "GPTSentencePieceTokenizer"),
	"bpe-bytes": sentencePiece("bpe-bytes", "Llama2Tokenizer"),
	"bpe-spanning": sentencePiece("bpe-spanning"),
	char: sentencePiece("char"),
	gpt2,
	hf,
	"tiktoken-v1": tiktoken("v1"),
	"tiktoken-v2": tiktoken("v2"),
};

const opened = (values: Values) =>
	configuredTokenizer(
		configurationOf(
			{ preset: "nemotron-tiny", "vocab-size": 2000, "num-layers": 5, ...values, device: "cpu" },
			{ trains: false },
		),
	);
const utf8 = new TextEncoder();

for (const [name, values] of Object.entries(kinds)) {
	test(`${name}: ids and decoded text are those of the library`, () => {
		const tokenizer = opened(values);
		const different = results.texts.filter((text, i) => {
			const ids = tokenizer.encode(utf8.encode(text));
			return !Bun.deepEquals([...ids], results.ids[name]![i]);
		});
		expect(different).toEqual([]);
		const decoded = results.decoded[name];
		if (decoded === undefined) return;
		const undecoded = results.texts.filter((_, i) => tokenizer.decode(results.ids[name]![i]!) !== decoded[i]);
		expect(undecoded).toEqual([]);
	});
}

const encoded = (values: Values, text: string) => [...opened(values).encode(utf8.encode(text))];

describe("special tokens", () => {
	test("of a SentencePiece model are recognised in markup alone", () => {
		const tokenizer = opened(kinds["bpe-bytes"]!);
		const text = "a</s>b";
		const parts = tokenizer.encodeParts([{ text, markup: true }]);
		expect([...parts].filter((id) => id === tokenizer.endOfDocument)).toHaveLength(1);
		expect(tokenizer.encode(utf8.encode(text))).not.toContain(tokenizer.endOfDocument!);
		expect(tokenizer.decode(parts)).toBe(text);
		expect(tokenizer.addedText(tokenizer.endOfDocument!)).toBe("</s>");
	});

	test("of TikTokenizer come first, and in text too", () => {
		const tokenizer = opened(tiktoken("v2"));
		expect([...tokenizer.encode(utf8.encode("<SPECIAL_9></s>"))]).toEqual([9, 2]);
		expect([...tokenizer.encodeParts([{ text: "</s>", markup: false }])]).not.toContain(2);
		expect([tokenizer.endOfDocument, tokenizer.vocabularySize]).toEqual([2, 700]);
	});

	test("are added behind the vocabulary", () => {
		const more = { "tokenizer-special-tokens": ["<turn>", "<|endoftext|>"] };
		const size = opened(gpt2).vocabularySize;
		expect(encoded({ ...gpt2, ...more }, "<turn>")).toEqual([size]);
		const legacy = { ...sentencePiece("bpe-bytes"), "tokenizer-sentencepiece-legacy": true, ...more };
		const { length } = encoded(sentencePiece("bpe-bytes"), "a");
		// The blank before a word that follows a special token is left out where it is a piece of its own.
		expect(encoded(legacy, "a<turn>").slice(length)).toEqual([opened(sentencePiece("bpe-bytes")).vocabularySize]);
		expect(opened(legacy).vocabularySize).toBe(opened(sentencePiece("bpe-bytes")).vocabularySize + 2);
		expect(() => opened({ ...sentencePiece("char"), ...more })).toThrow("only with tokenizer-sentencepiece-legacy");
	});

	test("around a text are left out where they are not wanted", () => {
		const plain = encoded({ ...hf, "tokenizer-hf-no-include-special-tokens": true }, "Hello");
		expect(encoded(hf, "Hello").slice(1, -1)).toEqual(plain);
		expect(encoded({ tokenizer: hf.tokenizer }, "Hello")).toEqual(plain);
	});
});

test("NullTokenizer reads ids", () => {
	const values = { "tokenizer-type": "NullTokenizer", "vocab-size": 100 };
	expect(encoded(values, "3 14  15".replace("  ", " "))).toEqual([3, 14, 15]);
	expect(opened(values).endOfDocument).toBe(99);
	expect(opened(values).decode([3, 14])).toBe("3 14");
	expect(() => encoded(values, "3 x")).toThrow('not "x"');
	expect(() => encoded(values, "100")).toThrow("below vocab-size 100");
});

test("the kind follows from the files, and vocab-size from the tokenizer", () => {
	const { "tokenizer-type": _, ...files } = gpt2;
	expect(encoded(files, "Hello")).toEqual(encoded(gpt2, "Hello"));
	const { "tokenizer-type": __, ...model } = sentencePiece("char");
	expect(encoded(model, "Hello")).toEqual(encoded(kinds.char!, "Hello"));
	const size = (values: Values) => readVocabularySize((key) => values[key])[0]?.value;
	expect(size(gpt2)).toBe(opened(gpt2).vocabularySize);
	expect(size(sentencePiece("char"))).toBe(opened(kinds.char!).vocabularySize);
	expect(size({ ...gpt2, "vocab-size": 5000 })).toBeUndefined();
	expect(size({ "tokenizer-type": 7 })).toBeUndefined();
});

describe("refuses", () => {
	const model = readFileSync(files["bpe-bytes.model"]!);
	const refused: Readonly<Record<string, readonly [values: Values, message: RegExp]>> = {
		"a type without its file": [{ "tokenizer-type": "TikTokenizer" }, /it needs tokenizer-model/],
		"one of two files": [{ "vocab-file": files["vocab.json"] }, /vocab-file and merge-file together/],
		"two tokenizers": [{ ...gpt2, "tokenizer-type": null, tokenizer: "x" }, /allowed is one of them/],
		"a type that is not built": [{ "tokenizer-type": "BertWordPieceCase" }, /BertWordPieceCase is not built/],
		"a damaged model": [
			{ ...kinds.char, tokenizer: scratch.file("cut.model", model.subarray(0, 1000)) },
			/cut\.model is (damaged|not a SentencePiece model)/,
		],
		"a model of other bytes": [
			{ ...kinds.char, tokenizer: scratch.file("other.model", utf8.encode("hello")) },
			/other\.model is (damaged|not a SentencePiece model)/,
		],
		"a larger vocabulary than the file's": [
			{ ...tiktoken("v2"), "vocab-size": 5000 },
			/vocab-size 5000 less 20 special tokens .*tiktoken\.json has/,
		],
		"too few special tokens": [
			{ ...tiktoken("v2"), "tokenizer-special-tokens": ["<unk>", "<s>"] },
			/tokenizer-special-tokens has no <\/s>/,
		],
		"a list that is none of TikTokenizer": [
			{ ...tiktoken("v2"), tokenizer: scratch.file("list.json", '[{"rank": 1, "token_bytes": "AA=="}]') },
			/list\.json is not a vocabulary of TikTokenizer: the rank of entry 0 is 1/,
		],
		"merges of another vocabulary": [
			{ ...gpt2, "merge-file": scratch.file("other.txt", "#version: 0.2\nq q\nqq qq\n") },
			/other\.txt: merge 1, "q q", makes no token/,
		],
	};
	for (const [name, [values, message]] of Object.entries(refused)) {
		test(name, () => expect(() => opened(values)).toThrow(message));
	}
});
