/** Descriptions of data sets that stand for more than anyone has: refused by name before anything grows. */

import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { writeSafetensors } from "../../src/checkpoint/safetensors.ts";
import { flatten } from "../../src/data/energon/format/flatten.ts";
import { readMetadataset } from "../../src/data/energon/format/metadataset.ts";
import { expandBraces } from "../../src/data/energon/format/webdataset.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { lint, type Problem } from "../../src/data/energon/tools/lint.ts";
import { readTokenRows } from "../../src/train/feed/sources.ts";
import { captions, Scratch, tar, tarHeader } from "./fixtures.ts";

const storage = new LocalStorage();
let scratch: Scratch;
beforeAll(() => {
	scratch = new Scratch();
	captions(scratch, "set", [3, 2]);
});
afterAll(() => scratch[Symbol.dispose]());

const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n";
const inherited = { splitPart: "train", subflavors: {}, multiplier: 1, subset: null };
const read = (path: string) => flatten(readMetadataset(storage, path), inherited).leaves;

describe("shard patterns are counted before they are expanded", () => {
	for (const pattern of [
		"s-{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}",
		"{000000000..999999999}",
		"{0..99999}{a,b,c,d,e,f,g,h,i,j,k}",
	]) {
		test(pattern, () => {
			const before = process.memoryUsage().rss;
			expect(() => expandBraces(pattern)).toThrow("too many names");
			expect(process.memoryUsage().rss - before).toBeLessThan(64 << 20);
		});
	}

	test("the characters of names are bounded too", () => {
		expect(() => expandBraces(`${"long".repeat(200)}{0..999999}`)).toThrow("too many names");
	});

	test("the largest allowed number of names is expanded", () => {
		const names = expandBraces("s-{000..999}{000..999}");
		expect([names.length, names[0], names[1001], names.at(-1)]).toEqual([1e6, "s-000000", "s-001001", "s-999999"]);
	});

	test("nested braces have a largest depth", () => {
		expect(expandBraces("{{{a,b},c},{d,e}}")).toEqual(["a", "b", "c", "d", "e"]);
		expect(() => expandBraces(`${"{".repeat(100_000)}a${"}".repeat(100_000)}`)).toThrow("nested braces");
	});
});

describe("metadatasets", () => {
	test("files that name each other twice are read once each, and their data sets are counted", () => {
		for (let i = 0; i < 40; i++) {
			scratch.file(`d${i}.yaml`, `${head}    blend:\n      - path: d${i + 1}.yaml\n      - path: d${i + 1}.yaml\n`);
		}
		scratch.file("d40.yaml", `${head}    path: set\n`);
		let opened = 0;
		const counting = Object.assign(Object.create(storage), {
			readText: (path: string) => {
				opened++;
				return storage.readText(path);
			},
		});
		const metadataset = readMetadataset(counting, join(scratch.path, "d0.yaml"));
		expect(opened).toBe(41);
		expect(() => flatten(metadataset, inherited)).toThrow("more than 100000 data sets");
		expect(read(join(scratch.path, "d36.yaml"))).toHaveLength(16);
	});

	test("empty blends are counted as well", () => {
		for (let i = 0; i < 40; i++) {
			scratch.file(`e${i}.yaml`, `${head}    blend:\n      - path: e${i + 1}.yaml\n      - path: e${i + 1}.yaml\n`);
		}
		scratch.file("e40.yaml", `${head}    blend: []\n`);
		expect(() => read(join(scratch.path, "e0.yaml"))).toThrow("more than 100000 data sets");
	});

	for (const [kind, key, value, shown] of [
		["blend", "weight", "-1", "-1"],
		["blend", "weight", "0", "0"],
		["blend", "weight", "1e999", "Infinity"],
		["blend", "weight", "1e-60", "1e-60"],
		["blend_epochized", "repetitions", "1e18", "1000000000000000000"],
		["blend_epochized", "repetitions", "-2", "-2"],
		["blend_epochized", "repetitions", "0", "0"],
	] as const) {
		test(`${key} ${value} is refused`, () => {
			const path = scratch.file("share.yaml", `${head}    ${kind}:\n      - {path: set, ${key}: ${value}}\n`);
			const message = `${key} of ${kind} entry 1 in split train of ${path} is ${shown}; allowed are numbers above 0`;
			expect(() => read(path)).toThrow(message);
		});
	}

	test("nan is not a number", () => {
		const path = scratch.file("nan.yaml", `${head}    blend:\n      - {path: set, weight: nan}\n`);
		expect(() => read(path)).toThrow("weight in blend entry 1");
	});

	test("fractions are accepted", () => {
		const path = scratch.file("half.yaml", `${head}    blend_epochized:\n      - {path: set, repetitions: 0.5}\n`);
		expect(read(path)[0]!.repetitions).toBe(0.5);
	});
});

describe("lint", () => {
	function problems(path: string): string[] {
		const found: string[] = [];
		const report = ({ where, what }: Problem) => found.push(`${where.split("/").at(-1)}: ${what}`);
		const images = (file: Uint8Array) => ({ file, width: 1, height: 1 });
		lint(storage, path, { images, check: null }, report);
		return found;
	}

	test("an index by key that is garbage or has other samples is reported", () => {
		const path = captions(scratch, "keys", [3, 2]);
		const index = join(path, ".nv-meta/index.sqlite");
		expect(problems(path)).toEqual([]);
		const bytes = readFileSync(index);
		const other = Buffer.from(bytes);
		other.write("KEYS", bytes.indexOf("keys000003"));
		writeFileSync(index, other);
		expect(problems(path)).toEqual([
			expect.stringContaining("the index by key differs from the tar at keys-001.tar/keys000003"),
		]);
		writeFileSync(index, Buffer.alloc(5000, "garbage"));
		expect(problems(path)).toEqual([expect.stringMatching(/index.sqlite: .* is not an index by key/)]);
	});

	test("an index by key that has more rows than its bytes hold is reported", () => {
		const path = captions(scratch, "endless", [3, 2]);
		const index = join(path, ".nv-meta/index.sqlite");
		const columns = "tar_file_id, sample_key, sample_index, byte_offset, byte_size";
		const planted = (...statements: string[]) => {
			rmSync(index);
			using database = new Database(index, { create: true });
			for (const statement of statements) database.run(statement);
		};
		planted(
			`CREATE VIEW samples(${columns}) AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT 0, i, i, i, i FROM n`,
		);
		expect(problems(path)).toEqual([
			expect.stringContaining("is not an index by key: samples is a view, not a table;"),
		]);
		planted(`CREATE TABLE samples(${columns}, whole AS (zeroblob(1000000000)))`);
		expect(problems(path)).toEqual([expect.stringContaining("samples has the computed column whole;")]);
		planted("CREATE TABLE other(a)");
		expect(problems(path)).toEqual([expect.stringContaining("it has no table samples;")]);
		// Pages that are in the table more than once.
		planted(
			`CREATE TABLE samples(${columns})`,
			"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT 4000) INSERT INTO samples SELECT 0, printf('%0200d', i), i, i, 1 FROM n",
		);
		const bytes = readFileSync(index);
		const page = 4096;
		// The root, page 2, is an interior page of pointers; each of its cells begins with a page number.
		expect(bytes[page]).toBe(5);
		const cells = bytes.readUInt16BE(page + 3);
		const cellAt = (i: number) => page + bytes.readUInt16BE(page + 12 + 2 * i);
		for (let i = 1; i < cells; i++) bytes.writeUInt32BE(bytes.readUInt32BE(cellAt(0)), cellAt(i));
		writeFileSync(index, bytes);
		expect(problems(path)).toEqual([
			expect.stringMatching(/is not an index by key: Tree \d+ page \d+ cell \d+: .*; `mimo data prepare/),
		]);
	});

	test("an absurd sample count is reported once for its shard", () => {
		const path = captions(scratch, "absurd", [3]);
		const info = join(path, ".nv-meta/.info.json");
		writeFileSync(info, readFileSync(info, "utf8").replace(": 3", ": 90000000000"));
		expect(problems(path)).toEqual(["absurd-000.tar: the tar has 3 samples, .info.json says 90000000000"]);
	});
});

describe("prepare", () => {
	const options = { ...defaultPrepareOptions, splitRatio: "8,1,1" };

	test("a truncated tar is refused, and the folder does not count as prepared", () => {
		const whole = tar([
			["a.txt", "first"],
			["b.txt", "second"],
			["c.txt", "third"],
		]);
		for (const [name, bytes, message] of [
			[
				"header",
				whole.subarray(0, 2 * 1024 + 100),
				"ends early: of the member at byte 2048, the header at byte 0 is cut off",
			],
			["content", whole.subarray(0, 2 * 1024 + 514), "is damaged: c.txt is cut off"],
			[
				"garbage",
				Buffer.concat([whole.subarray(0, 2048), Buffer.alloc(1024, 7)]),
				"ends early: of the member at byte 2048, a number at byte 0 is",
			],
		] as const) {
			const folder = join(scratch.file(`cut-${name}/0.tar`, bytes), "..");
			expect(() => prepare(folder, options)).toThrow(message);
			expect(storage.isFile(join(folder, ".nv-meta/.info.json"))).toBe(false);
			if (name === "content") continue;
			expect(prepare(folder, { ...options, splitRatio: "1,0,0", keepCutOff: true }).samples).toBe(2);
		}
		expect(tarHeader("x", 0)).toHaveLength(512);
	});

	test("a tar without an end mark is prepared with a warning; parts without shards are named", () => {
		const bytes = tar([["a.txt", "first"]]);
		const folder = join(scratch.file("mark/0.tar", bytes.subarray(0, 1024)), "..");
		const lines: string[] = [];
		prepare(folder, { ...options, report: (line) => lines.push(line) });
		expect(lines).toContain("warning: 0.tar has no end mark: files after its last sample may be missing");
		expect(lines).toContain("warning: train gets none of 1 shard, too few for 8,1,1");
		const info = JSON.parse(readFileSync(join(folder, ".nv-meta/.info.json"), "utf8"));
		expect(info).toEqual({ energon_version: "7.4.0", shard_counts: { "0.tar": 1 } });
	});
});

test("64-bit token ids are compared before they are narrowed", () => {
	const path = join(scratch.path, "tokens.safetensors");
	const rows = (id: bigint) => {
		const values = BigInt64Array.of(1n, 2n, id);
		writeSafetensors(path, [{ name: "tokens", dtype: "I64", shape: [1, 3], data: () => values }]);
		return () => readTokenRows(path, 2, 256);
	};
	expect([...rows(255n)()]).toEqual([1, 2, 255]);
	for (const id of [2n ** 40n + 5n, 2n ** 32n, -1n, 256n]) {
		expect(rows(id)).toThrow(`Token 2 of ${path} is ${id}, outside the vocabulary of vocab-size 256`);
	}
});

test("a McoreBlend names what its JSON file lacks", () => {
	const wrap = (blend: unknown) => {
		scratch.file("blend.json", typeof blend === "string" ? blend : JSON.stringify(blend));
		scratch.file("wrap.yaml", "__module__: megatron.energon\n__class__: McoreBlend\nmcore_json: ./blend.json\n");
		return () => read(join(scratch.path, "wrap.yaml"));
	};
	expect(wrap({ train: ["1.0", "./doc_text_document"] })).toThrow(
		`train in ${scratch.path}/blend.json: there is no ${scratch.path}/doc_text_document.bin with its .idx`,
	);
	expect(wrap({ train: ["./doc_text_document"] })).toThrow("train has no weights");
	expect(wrap({ train: ["0", "./doc_text_document"] })).toThrow("where a weight above 0 is allowed");
	expect(wrap({ valid: 3 })).toThrow("valid is neither a text nor a list of weights and paths");
	expect(wrap({})).toThrow("has none of the splits train, valid and test");
	expect(wrap("{")).toThrow("blend.json is not JSON");
});
