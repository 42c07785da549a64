/** Indexed text as samples: documents in pieces, in which every token is predicted once. */
import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { IndexedReader, tokenPart } from "../../../src/data/energon/format/indexed.ts";
import { tokenSample } from "../../../src/data/energon/sample.ts";
import { IndexedWriter } from "../../../src/data/megatron/indexed-file.ts";
import { encodeTokens } from "../../../src/data/vision-language/encoding.ts";

const folder = mkdtempSync(join(tmpdir(), "mimo-indexed-"));
afterAll(() => rmSync(folder, { recursive: true }));
const path = join(folder, "text.bin");
/** Documents of so many tokens: of none, of one, and of whole pieces and a token more. */
const lengths = [9, 0, 1, 4, 5, 2];
let next = 0;
const documents = lengths.map((length) => Int32Array.from({ length }, () => next++));
const writer = new IndexedWriter(join(folder, "text"), 300);
for (const ids of documents) writer.add(ids, [ids.length]);
writer.finish();

const samplesOf = (reader: IndexedReader) =>
	Array.from({ length: reader.length }, (_, index) => {
		const { buffer } = reader.read(index).parts.get(tokenPart)!;
		const tokens = new Int32Array(buffer as ArrayBuffer);
		const sample = {
			key: String(index),
			restoreKey: [],
			sources: [],
			subflavors: {},
			type: tokenSample,
			fields: { tokens },
		};
		return encodeTokens(sample, { imageTokenId: 999, vocabularySize: 300 });
	});

test.each([4, 3, null])("pieces of %p tokens", (tokens) => {
	const samples = samplesOf(new IndexedReader(path, tokens));
	const inputs = documents.flatMap((ids) => [...ids.slice(0, -1)]);
	const labels = documents.flatMap((ids) => [...ids.slice(1)]);
	expect(samples.flatMap(({ ids }) => [...ids])).toEqual(inputs);
	expect(samples.flatMap((sample) => [...sample.labels])).toEqual(labels);
	expect(Math.max(...samples.map(({ ids }) => ids.length))).toBe(tokens ?? 8);
});

test("ids that no text has are named", () => {
	const sample = { key: "7", restoreKey: [], sources: [], subflavors: {}, type: tokenSample, fields: {} };
	const of = (...ids: number[]) => ({ ...sample, fields: { tokens: Int32Array.from(ids) } });
	const task = { imageTokenId: 5, vocabularySize: 20 };
	expect(() => encodeTokens(of(1, 5), task)).toThrow("Sample 7 has the token 5, the image token");
	expect(() => encodeTokens(of(1, 20), task)).toThrow("the token 20, outside of vocab-size 20");
	expect(() => new IndexedReader(path, 4).read(99)).toThrow("There is no sample 99");
});
