/** JSON lines to indexed data: documents in the order of the file, whatever the number of threads. */
import { afterAll, expect, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { IndexedFile } from "../../../src/data/megatron/indexed-file.ts";
import { type PrepareTextOptions, prepareText } from "../../../src/data/megatron/prepare-text.ts";
import type { TokenizerKeys } from "../../../src/data/text/configured-tokenizer.ts";
import { mimo } from "../../commands/mimo.ts";
import { Scratch } from "../fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const path = (name: string) => join(scratch.path, name);

const bytes: TokenizerKeys = {
	...{ tokenizer: null, tokenizerType: null, vocabFile: null, mergeFile: null, tokenizerSpecialTokens: null },
	...{ tokenizerHfNoIncludeSpecialTokens: false, tokenizerSentencepieceLegacy: false, tiktokenPattern: "v2" as const },
	...{ tiktokenNumSpecialTokens: 1000, nullTokenizerEodId: null, vocabSize: null },
};

function prepared(lines: readonly string[], output: string, more: Partial<PrepareTextOptions> = {}, keys = ["text"]) {
	const input = scratch.file("lines.jsonl", lines.join("\n"));
	const encoding = { tokenizer: bytes, keys, path: input };
	const common = { appended: null, workers: 1, overwrite: false, ...more };
	return prepareText({ encoding, outputPrefix: path(output), ...common });
}

/** Texts of the sequences of every document. */
function documentsOf(prefix: string): string[][] {
	using file = IndexedFile.open(path(prefix));
	const sequences = Array.from(file.lengths, (count, sequence) => {
		const ids = new Int32Array(count);
		file.read(sequence, { offset: 0, count, vocabularySize: 1000 }, ids, 0);
		return String.fromCharCode(...ids);
	});
	return [...file.documents.subarray(1)].map((end, i) => sequences.slice(file.documents[i]!, end));
}

test("documents of texts, of lists of texts, and empty ones", async () => {
	const lines = [
		'{"text": "ab", "title": "T"}',
		'{"text": ["c", "", "de"], "title": ""}',
		'{"text": "", "title": "U"}',
	];
	const { documents, tokens } = await prepared(lines, "all", { appended: 46 }, ["text", "title"]);
	expect([documents, tokens]).toEqual([3, 11]);
	expect(documentsOf("all_text_document")).toEqual([["ab."], ["c", "de."], []]);
	expect(documentsOf("all_title_document")).toEqual([["T."], [], ["U."]]);
});

test("three threads write what one does", async () => {
	const lines = Array.from({ length: 4000 }, (_, i) => JSON.stringify({ text: `${i} `.repeat((i * 37) % 100) }));
	await prepared(lines, "one", { workers: 1 });
	await prepared(lines, "three", { workers: 3 });
	for (const suffix of ["idx", "bin"]) {
		const [one, three] = ["one", "three"].map((name) => readFileSync(path(`${name}_text_document.${suffix}`)));
		expect(one!.equals(three!)).toBe(true);
	}
	expect(documentsOf("three_text_document")[99]).toEqual(["99 ".repeat((99 * 37) % 100)]);
});

test("a line that is no document is named, and leaves no index", async () => {
	const failure = async (line: string) => {
		const lines = [...Array.from({ length: 9000 }, () => '{"text": "fine fine fine fine fine fine"}'), line];
		const error = await prepared(lines, "broken", { workers: 2 }).catch((reason: Error) => reason);
		expect(existsSync(path("broken_text_document.idx"))).toBe(false);
		return (error as Error).message;
	};
	expect(await failure('{"text": "half')).toMatch(/lines\.jsonl, line 9001 is not JSON: /);
	expect(await failure("[1]")).toMatch(/line 9001: its field text is missing\.$/);
	expect(await failure("null")).toMatch(/line 9001 is no JSON object\.$/);
	expect(await failure('{"text": [1]}')).toMatch(/line 9001: its field text is neither a text nor a list of texts\.$/);
});

test("data that are there are replaced only when asked", async () => {
	await prepared(['{"text": "old"}'], "kept");
	await expect(prepared(['{"text": "new"}'], "kept")).rejects.toThrow(
		/kept_text_document\.idx is there already; --force-overwrite replaces it\.$/,
	);
	await prepared(['{"text": "new"}'], "kept", { overwrite: true });
	expect(documentsOf("kept_text_document")).toEqual([["new"]]);
});

test("a tokenizer without an end of documents asks for one", async () => {
	await expect(prepared(['{"text": "a"}'], "endless", { appended: "tokenizer's" })).rejects.toThrow(
		"The tokenizer of bytes names no token that ends a document: give --data-end-id.",
	);
});

test("the command takes Megatron's flags, and training takes what it writes", () => {
	const lines = Array.from({ length: 300 }, (_, i) => JSON.stringify({ text: `${i} 7 11 ${i}`, title: `${i}` }));
	scratch.file("ids.jsonl", lines.join("\n"));
	const flags = "--tokenizer-type NullTokenizer --vocab-size 320 --append-eod --workers 2";
	const prepare = `data prepare-text --input ids.jsonl --output-prefix ids --json-keys text title ${flags}`;
	const made = mimo(prepare.split(" "), scratch.path);
	expect([made.exitCode, made.stdout, made.stderr]).toEqual([
		0,
		"300 documents of 2100 tokens in ids_text_document, ids_title_document\n",
		"",
	]);
	using file = IndexedFile.open(path("ids_text_document"));
	expect([file.type, file.lengths[0], file.lengths.length]).toEqual(["uint16", 5, 300]);
	const small =
		"--preset nemotron-tiny --hidden-size 64 --seq-length 32 --device cpu --lr-warmup-iters 0 --eval-iters 1";
	const own = "--tokenizer-type NullTokenizer --vocab-size 320 --eod-mask-loss --reset-attention-mask --split 80,10,10";
	const train = `train ${small} ${own} --train-iters 2 --eval-interval 2 --eval-micro-batch-size 1`;
	const words = ["--data-path", "0.3", "ids_title_document", "0.7", "ids_text_document"];
	const trained = mimo([...train.split(" "), ...words], scratch.path);
	expect([trained.exitCode, trained.stderr]).toEqual([0, ""]);
	expect(trained.stdout).toMatch(
		/validation loss at iteration 2 \|[\s\S]*validation loss at iteration 2 on test set \|/,
	);
	const unknown = mimo([...prepare.split(" "), "--lr", "1"], scratch.path);
	expect([unknown.exitCode, unknown.stderr]).toEqual([2, "mimo: --lr is no flag of `mimo data prepare-text`.\n"]);
});
