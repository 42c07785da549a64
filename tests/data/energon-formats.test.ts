import { Database } from "bun:sqlite";
import { describe, expect, test } from "bun:test";
import { cpSync, existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { accessField, parseFieldAccess } from "../../src/data/energon/format/dataset-config.ts";
import { OffsetIndex } from "../../src/data/energon/format/jsonl.ts";
import { splitMemberName } from "../../src/data/energon/format/names.ts";
import { parseYaml } from "../../src/data/energon/format/python-text.ts";
import { readMember, SplitPartReader } from "../../src/data/energon/format/tar.ts";
import { collapseBraces, expandBraces, readSplitPart } from "../../src/data/energon/format/webdataset.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { resolvePath } from "../../src/data/energon/storage/storage.ts";
import { Scratch, tar } from "./fixtures.ts";

const storage = new LocalStorage();

function entries(path: string): number[] {
	const index = OffsetIndex.open(storage, path);
	return Array.from({ length: index.length }, (_, i) => index.at(i));
}

test("member names (docs/spec/energon.md §1.2)", () => {
	const cases: [string, [string, string] | null][] = [
		["a.b/c.jpg", ["a.b/c", "jpg"]],
		["000.img1.jpg", ["000", "img1.jpg"]],
		["x.tar.gz", ["x", "tar.gz"]],
		["a.", ["a", ""]],
		["dir/.hidden", ["dir/", "hidden"]],
		["__x__.jpg", ["__x__", "jpg"]],
		["d/__x__/a.jpg", ["d/__x__/a", "jpg"]],
		[".a", null],
		["a/b", null],
		["a.b/c", null],
		["__meta__/a.txt", null],
	];
	for (const [name, expected] of cases) {
		const split = splitMemberName(name);
		expect(split === null ? null : [split.base, split.extension]).toEqual(expected);
	}
});

test("brace patterns expand as bash's do and collapse again", () => {
	expect(expandBraces("s-{008..011}.tar")).toEqual(["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]);
	expect(expandBraces("{a,b{1..2}}x")).toEqual(["ax", "b1x", "b2x"]);
	expect(expandBraces("{2..-1}")).toEqual(["2", "1", "0", "-1"]);
	expect(expandBraces("{a..g..2}")).toEqual(["a", "c", "e", "g"]);
	expect(expandBraces("a\\{1\\}")).toEqual(["a{1}"]);
	expect(() => expandBraces("{1{2,3}")).toThrow("unbalanced braces");
	const names = ["p0/s-08.tar", "p0/s-09.tar", "p0/s-10.tar", "p1/s-08.tar", "x.tar"];
	expect(collapseBraces(names)).toEqual(["p0/s-{08..10}.tar", "p1/s-08.tar", "x.tar"]);
	expect(collapseBraces(names).flatMap(expandBraces)).toEqual(names);
});

test("YAML scalars are cast by Energon's rules", () => {
	const text = "a: 0123\nb: '5'\nc: 1e3\nd: yes\ne: ~\nf: 25%\ng: 1.2.3\nh: Hello\ni: -7\n";
	expect(parseYaml(text, "x.yaml")).toEqual(
		new Map<string, unknown>([
			["a", 123],
			["b", "5"],
			["c", 1000],
			["d", true],
			["e", null],
			["f", "25%"],
			["g", "1.2.3"],
			["h", "Hello"],
			["i", -7],
		]) as never,
	);
	expect(() => parseYaml("a: {b", "x.yaml")).toThrow(/^x\.yaml, line 1/);
	expect(() => parseYaml("[".repeat(100_000), "x.yaml")).toThrow(/^x\.yaml, line 1, .*: its parts nest too deeply\.$/);
});

test("field access uses the first alternative that the sample has", () => {
	const parts = { txt: "plain", json: { caption: "nested", list: [10, 20] } };
	expect(accessField(parts, parseFieldAccess("md,txt"), "k")).toBe("plain");
	expect(accessField(parts, parseFieldAccess("json[caption]"), "k")).toBe("nested");
	expect(accessField(parts, parseFieldAccess("json[list][1]"), "k")).toBe(20);
	expect(() => accessField(parts, parseFieldAccess("jpg,json[title]"), "k")).toThrow("no jpg or json[title]");
});

test("paths are resolved like files and URLs", () => {
	expect(resolvePath("/a/b", "../c")).toBe("/a/c");
	expect(resolvePath("s3://bucket/x", "../y/z.tar")).toBe("s3://bucket/y/z.tar");
	expect(resolvePath("/a", "https://host/p/./q")).toBe("https://host/p/q");
});

describe("tar", () => {
	test("long names, PAX sizes, damage", () => {
		const long = `${"folder/".repeat(20)}file.txt`;
		const bytes = tar([
			[long, "content"],
			["b.txt", "x"],
		]);
		const first = readMember(bytes, 0)!;
		expect([first.name, first.contentOffset, first.size, first.end]).toEqual([long, 1536, 7, 2048]);
		expect(readMember(bytes, first.end)!.name).toBe("b.txt");
		expect(readMember(bytes, 3072)).toBeNull();
		expect(() => readMember(bytes, 512)).toThrow("checksum");
		expect(() => readMember(bytes.subarray(0, 700), 0)).toThrow("cut off");
	});
});

describe("prepare", () => {
	test("index, sqlite and split of the example of docs/spec/energon.md §9.6", () => {
		using folder = new Scratch();
		const members = [
			["__meta__/info.txt", 10],
			["000000.jpg", 1000],
			["000000.txt", 5],
			["000001.jpg", 600],
			["sub/000002.a.json", 20],
		] as const;
		folder.file("set/shard.tar", tar(members.map(([name, size]) => [name, "x".repeat(size)])));
		const path = join(folder.path, "set");
		const made = prepare(path, { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
		expect([made.samples, made.parts]).toEqual([3, ["a.json", "jpg", "txt"]]);
		expect(entries(join(path, "shard.tar.idx"))).toEqual([1024, 3584, 5120, 6144]);
		using database = new Database(join(path, ".nv-meta/index.sqlite"), { readonly: true });
		expect(database.query("SELECT sample_key, sample_index, byte_offset, byte_size FROM samples").values()).toEqual([
			["000000", 0, 1024, 2560],
			["000001", 1, 3584, 1536],
			["sub/000002", 2, 5120, 1024],
		]);
		const parts = "SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts";
		expect(database.query(parts).values()).toEqual([
			["jpg", 1536, 1000],
			["txt", 3072, 5],
			["jpg", 4096, 600],
			["a.json", 5632, 20],
		]);
		const part = readSplitPart(storage, path, "train", null);
		const reader = new SplitPartReader(storage, path, part, { wanted: null, openShards: 1 });
		expect([0, 1, 2].map((i) => [reader.read(i)!.key, [...reader.read(i)!.parts.keys()]])).toEqual([
			["000000", ["jpg", "txt"]],
			["000001", ["jpg"]],
			["sub/000002", ["a.json"]],
		]);
		expect(() => reader.read(3)).toThrow("no sample 3");
	});

	test("shards are divided by ratio, shuffled as Python shuffles (docs/spec/energon.md §1.8)", () => {
		using folder = new Scratch();
		for (let i = 0; i < 10; i++) folder.file(`s/${i}.tar`, tar([[`k${i}.txt`, "x"]]));
		const path = join(folder.path, "s");
		const options = { ...defaultPrepareOptions, splitRatio: "8,1,1", forceOverwrite: true };
		prepare(path, { ...options, shuffleTars: true });
		const split = readFileSync(join(path, ".nv-meta/split.yaml"), "utf8");
		const order = ["train", "val", "test"].flatMap((part) =>
			readSplitPart(storage, path, part, null).shards.map(({ name }) => Number(name[0])),
		);
		expect(order).toEqual([7, 3, 2, 8, 5, 6, 9, 4, 0, 1]);
		prepare(path, options);
		const plain = readFileSync(join(path, ".nv-meta/split.yaml"), "utf8");
		expect(plain).toBe(
			"split_parts:\n  train:\n  - '{0..7}.tar'\n  val:\n  - 8.tar\n  test:\n  - 9.tar\nexclude: []\n",
		);
		expect(split).not.toBe(plain);
	});

	test("duplicate keys are refused, then repaired in place", () => {
		using folder = new Scratch();
		for (const shard of ["a", "b"]) folder.file(`s/${shard}.tar`, tar([["k.txt", shard]]));
		const path = join(folder.path, "s");
		const options = { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" };
		expect(() => prepare(path, options)).toThrow('The sample key "k" of b.tar is not unique');
		expect(existsSync(join(path, ".nv-meta/.info.json"))).toBe(false);
		prepare(path, { ...options, fixDuplicates: true });
		const part = readSplitPart(storage, path, "train", null);
		const reader = new SplitPartReader(storage, path, part, { wanted: null, openShards: 2 });
		expect([reader.read(0)!.key, reader.read(1)!.key]).toEqual(["a/k", "b/k"]);
		expect(Buffer.from(reader.read(1)!.parts.get("txt")!).toString()).toBe("b");
	});

	test("bad input is refused by name and leaves no files", () => {
		using folder = new Scratch();
		folder.file("s/0.tar", tar([["k.txt", "x"]]));
		const path = join(folder.path, "s");
		const options = { ...defaultPrepareOptions, splitRatio: "1,0,0" };
		expect(() => prepare(path, { ...options, splitRatio: "1,0" })).toThrow("not three shares");
		expect(() => prepare(path, { ...options, sampleType: "CaptionSample" })).toThrow("no sample type CaptionSample");
		expect(() => prepare(path, { ...options, exclude: "tar" })).toThrow("no tar files besides those excluded");
		expect(existsSync(join(path, ".nv-meta"))).toBe(false);
		prepare(path, options);
		expect(() => prepare(path, options)).toThrow("prepared already");
		const cut = join(folder.path, "cut");
		cpSync(path, cut, { recursive: true });
		folder.file("cut/0.tar", readFileSync(join(path, "0.tar")).subarray(0, 512));
		expect(() => prepare(cut, { ...options, forceOverwrite: true })).toThrow("cut off");
	});

	test("JSONL offsets: blank lines belong to the record before them", () => {
		using folder = new Scratch();
		const path = folder.file("f.jsonl", '\n{"a": 1}\n\n{"a": 2}\n');
		expect(prepare(path, defaultPrepareOptions).samples).toBe(2);
		expect(entries(join(folder.path, "f.jsonl.idx"))).toEqual([0, 11, 20]);
		const list = folder.file("g.jsonl", '{"a": 1}\n["a"]\n');
		expect(() => prepare(list, defaultPrepareOptions)).toThrow("g.jsonl, line 2");
	});
});
