/** `mimo train` on ready-made tokens and through a tokenizer.json. */
import { afterAll, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { openTokenizer } from "../../src/data/text/tokenizer.ts";
import { loggedSteps, SmallRun } from "./small-run.ts";

const run = new SmallRun();
afterAll(() => run[Symbol.dispose]());

const losses = (name: string) => loggedSteps(run.path(name)).map((step) => step["lm loss"] as number);

/** Byte-level BPE whose merges make "th" and "the", on an alphabet of the text's letters. */
const bpe = () => {
	const letters = ["Ġ", ..."abcdefghijklmnopqrstuvwxyz", "th", "the"];
	return {
		version: "1.0",
		truncation: null,
		padding: null,
		added_tokens: [],
		normalizer: null,
		pre_tokenizer: { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true },
		post_processor: null,
		decoder: { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true },
		model: {
			type: "BPE",
			dropout: null,
			unk_token: null,
			continuing_subword_prefix: null,
			end_of_word_suffix: null,
			fuse_unk: false,
			byte_fallback: false,
			vocab: Object.fromEntries(letters.map((letter, id) => [letter, id])),
			merges: ["t h", "th e"],
		},
	};
};

test("a tokenizer.json encodes the text", () => {
	writeFileSync(run.path("tokenizer.json"), JSON.stringify(bpe()));
	const tokenizer = openTokenizer(run.path("tokenizer.json"));
	expect(tokenizer.vocabularySize).toBe(29);
	const ids = tokenizer.encode(new TextEncoder().encode("in the beginning"));
	expect([...ids]).toEqual([9, 14, 0, 28, 0, 2, 5, 7, 9, 14, 14, 9, 14, 7]);
	expect(tokenizer.decode(ids)).toBe("in the beginning");

	const flags = ["--tokenizer", "tokenizer.json", "--vocab-size", "29", "--train-iters", "12"];
	const { exitCode, stderr, stdout } = run.train([...flags, "--log-json", "bpe.jsonl"]);
	expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
	expect(stdout).not.toContain("bits per byte");
	const [first, ...rest] = losses("bpe.jsonl");
	expect(Math.abs(first! - Math.log(29))).toBeLessThan(0.7);
	expect(rest.at(-1)!).toBeLessThan(first! - 0.5);
});

test("rows of a safetensors file are the samples, in order", () => {
	// The same ids in both integer types; other ids must train otherwise.
	const bytes = readFileSync(run.path("text.txt"));
	const rows = (offset: number) => Array.from({ length: 32 * 65 }, (_, i) => bytes[offset + i]!);
	const write = (name: string, dtype: "I32" | "I64", values: readonly number[]) =>
		writeSafetensors(run.path(name), [
			{
				name: "tokens",
				dtype,
				shape: [32, 65],
				data: () => (dtype === "I32" ? Int32Array.from(values) : BigInt64Array.from(values, BigInt)),
			},
		]);
	write("narrow.safetensors", "I32", rows(0));
	write("wide.safetensors", "I64", rows(0));
	write("other.safetensors", "I32", rows(1));
	for (const name of ["narrow", "wide", "other"]) {
		const { exitCode, stderr, stdout } = run.train([
			...["--data-path", `${name}.safetensors`, "--valid-data-path", "other.safetensors"],
			...["--train-iters", "6", "--log-json", `${name}.jsonl`],
		]);
		expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: "" });
		expect(stdout).toMatch(/^Held-out loss: \d\.\d{4} a token\.$/m);
	}
	expect(losses("wide.jsonl")).toEqual(losses("narrow.jsonl"));
	expect(losses("other.jsonl")).not.toEqual(losses("narrow.jsonl"));
	expect(losses("narrow.jsonl").at(-1)!).toBeLessThan(losses("narrow.jsonl")[0]!);
});
