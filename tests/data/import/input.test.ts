/** Skipped rows and refused inputs of an import are named. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { mkdirSync, readFileSync, symlinkSync } from "node:fs";
import { join } from "node:path";
import { detect, partOf } from "../../../src/data/import/detect.ts";
import { parseSkipLimit } from "../../../src/data/import/journal.ts";
import type { Columns } from "../../../src/data/import/row.ts";
import { jsonEntries, jsonLines } from "../../../src/data/import/sources/json-records.ts";
import { checkPages, compressors } from "../../../src/data/import/sources/parquet-pages.ts";
import { InputFile } from "../../../src/system/input-file.ts";
import { randomValues } from "../../support.ts";
import { png, Scratch, tar } from "../fixtures.ts";
import { golden, importing, membersOf } from "./importing.ts";

const scratch = new Scratch();
let server: ReturnType<typeof Bun.serve>;
const picture = png(8, 8, 1);
scratch.file("a.png", picture);
scratch.file("broken.png", picture.subarray(0, 20));
scratch.file("b.tiff", "II*\0aaaaaaaaaaaa");
beforeAll(() => {
	server = Bun.serve({
		port: 0,
		hostname: "127.0.0.1",
		fetch(request) {
			const { pathname } = new URL(request.url);
			if (pathname === "/gone.png") return new Response("", { status: 404 });
			if (pathname === "/whole.png") return new Response(picture);
			if (pathname === "/huge.png")
				return new Response("", { status: 206, headers: { "content-range": "bytes 0-0/99999999999" } });
			const [, from, to] = /bytes=(\d+)-(\d+)/.exec(request.headers.get("range") ?? "") ?? [];
			const bytes = picture.subarray(Number(from), Number(to) + 1);
			const range = `bytes ${from}-${Number(from) + bytes.length - 1}/${picture.length}`;
			return new Response(bytes, { status: 206, headers: { "content-range": range } });
		},
	});
});
afterAll(() => {
	server.stop(true);
	scratch[Symbol.dispose]();
});

let imports = 0;
const output = () => join(scratch.path, `out-${imports++}`);

describe("rows that are skipped, with the reason", () => {
	const turn = (from: string, value: unknown) => ({ from, value });
	const cases: readonly (readonly [record: unknown, reason: string | RegExp])[] = [
		["{broken", /^the record is not JSON/],
		[[1], "the record is not a JSON object"],
		[{}, "it has neither a conversation nor text"],
		[{ image: "a.png", caption: " " }, "it has neither a conversation nor text"],
		[{ image: "none.png", caption: "c" }, /^the image cannot be read \(Cannot open .*none.png: it does not exist\)/],
		[{ image: "broken.png", caption: "c" }, /^the image ".*broken.png" cannot be used/],
		[{ image: "b.tiff", caption: "c" }, /^the image ".*b.tiff" cannot be used \(.*TIFF/],
		[{ image: "ftp://host/a.png", caption: "c" }, /^an image has the URL "ftp:/],
		[
			{ image: "data:image/png;base64,%%%", caption: "c" },
			"an image in base64 has characters that base64 does not have",
		],
		[{ image: "data:image/png,abc", caption: "c" }, "an image is a data URI that is not in base64"],
		[{ image: 7, caption: "c" }, /^an image is given as number \(7\)/],
		[{ video: "a.mp4", text: "t" }, "its field video names video, which is not built yet"],
		[
			{ image: "a.png", conversations: [turn("human", "<image><image>?"), turn("gpt", "!")] },
			/^it has 2 <image> tags and 1 image\b/,
		],
		[{ conversations: [turn("human", "?")] }, "it has no turn of an assistant, so nothing is learned from it"],
		[{ conversations: [turn("human", "?"), turn("gpt", " ")] }, "its answer is empty"],
		[{ conversations: [{ value: "?" }, turn("gpt", "!")] }, "turn 1 has no role"],
		[{ conversations: [turn("human", 5), turn("gpt", "!")] }, "turn 1 has no text"],
		[{ messages: [{ role: "narrator", content: "?" }] }, "it has no turn of an assistant"],
		[{ messages: [{ role: "user", content: [{ type: "input_audio" }] }] }, /^turn 1 has content of type "input_audio"/],
		[{ texts: ["a"], images: [null, "a.png"] }, /^it has 1 text and 2 images/],
		[
			{ text_list: ["a"], image_info: [{ image_name: "a.png", matched_text_index: 3 }] },
			"an image of it belongs to text 3 of 1",
		],
	];
	test("in JSON lines", async () => {
		const lines = cases.map(([record]) => (typeof record === "string" ? record : JSON.stringify(record)));
		const path = scratch.file("bad.jsonl", `{"text": "fine"}\n${lines.join("\n")}\n`);
		const folder = output();
		const { samples, skipped } = await importing(path, folder, { skipLimit: { rows: 100 } });
		expect(samples).toBe(1);
		expect(skipped.reduce((sum, { count }) => sum + count, 0)).toBe(cases.length);
		const listed = readFileSync(join(folder, "skipped.jsonl"), "utf8").trim().split("\n");
		for (const [i, [, reason]] of cases.entries()) {
			const { where, reason: said } = JSON.parse(listed[i]!) as { where: string; reason: string };
			expect(where).toBe(`${path}, line ${i + 2}`);
			expect(said).toMatch(reason);
		}
	});

	test("equal reasons are counted together, with their first examples", async () => {
		const rows = Array.from({ length: 9 }, (_, i) => `{"image": "none-${i}.png", "caption": "c"}`);
		const path = scratch.file("many.jsonl", `{"text": "fine"}\n${rows.join("\n")}\n`);
		const { skipped } = await importing(path, output());
		expect(skipped.map(({ count, examples }) => [count, examples.length])).toEqual([[9, 3]]);
	});

	test("in a table, a folder of pictures and a tar that ends early", async () => {
		const csv = scratch.file("rows.csv", "image,caption\na.png,one\na.png\na.png,two,three\n");
		const table = await importing(csv, output());
		expect(table.skipped.map(({ reason }) => reason)).toEqual(["the row has N columns, the header N"]);
		scratch.file("pics/a.png", picture);
		scratch.file("pics/b.png", picture);
		scratch.file("pics/b.txt", "text\n");
		const pictures = await importing(join(scratch.path, "pics"), output());
		expect(pictures.skipped.map(({ examples }) => examples[0])).toEqual([
			`${join(scratch.path, "pics/a.png")}: it has no .txt or .json file of the same name beside it`,
		]);
		const whole = tar([
			["a.png", picture],
			["a.txt", "a"],
			["b.png", picture],
			["b.txt", "b"],
		]);
		const cut = await importing(scratch.file("cut.tar", whole.subarray(0, 2600)), output());
		expect([cut.samples, cut.skipped[0]!.examples[0]]).toEqual([
			1,
			expect.stringMatching(/cut.tar, its end: the tar ends early: /),
		]);
	});
});

describe("images on servers", () => {
	test("are fetched in order, and skipped by reason", async () => {
		const names = ["1.png", "gone.png", "2.png", "whole.png", "3.png", "huge.png"];
		const rows = names.map((name) => JSON.stringify({ url: `${server.url}${name}`, caption: name }));
		const folder = output();
		const { samples, skipped } = await importing(scratch.file("urls.jsonl", rows.join("\n")), folder, {
			skipLimit: { rows: 9 },
		});
		expect(samples).toBe(3);
		const texts = Object.values(membersOf(folder)).filter((value) => value.startsWith("{"));
		expect(texts).toEqual(["1.png", "2.png", "3.png"].map((caption) => JSON.stringify({ caption })));
		const reasons = skipped.flatMap(({ examples }) => examples).join("\n");
		expect(reasons).toContain("gone.png does not exist");
		expect(reasons).toContain("the server sends whole files only");
		expect(reasons).toContain("has 99999999999 bytes; at most 268435456 are read");
	});
});

test("images inside the own network are skipped, unless a flag allows them", async () => {
	const { port } = server;
	const hosts = [`127.0.0.1:${port}`, `localhost:${port}`, `[::ffff:127.0.0.1]:${port}`, "169.254.169.254"];
	const rows = hosts.map((host) => JSON.stringify({ url: `http://u:p@${host}/1.png?token=1`, caption: "c" }));
	const path = scratch.file("inside.jsonl", [...rows, '{"text": "a"}'].join("\n"));
	const { samples, skipped } = await importing(path, output(), { privateAddresses: false, skipLimit: { rows: 9 } });
	expect(samples).toBe(1);
	const reasons = skipped.flatMap(({ examples }) => examples);
	expect(reasons).toHaveLength(4);
	for (const host of hosts) {
		const reason = reasons.find((text) => text.includes(`the image http://${host}/1.png is at `));
		expect(reason).toEndWith("inside this machine's own network: --private-addresses allows it");
	}
});

test("captions are not read through links out of the folder", async () => {
	const folder = scratch.file("pictures-links/a.png", picture).replace("/a.png", "");
	scratch.file("pictures-links/a.txt", "one");
	scratch.file("pictures-links/sub/b.png", picture);
	scratch.file("secret.txt", "root:x:0:0");
	scratch.file("pictures-links/c.png", picture);
	scratch.file("pictures-links/d.png", picture);
	symlinkSync("../a.txt", join(folder, "sub/b.txt"));
	symlinkSync("../secret.txt", join(folder, "c.txt"));
	Bun.spawnSync(["mkfifo", join(folder, "d.txt")]);
	const target = output();
	const { samples, skipped } = await importing(folder, target, { skipLimit: { rows: 9 } });
	expect(samples).toBe(2);
	expect(skipped.flatMap(({ examples }) => examples)).toEqual([
		expect.stringMatching(
			/c\.png: its text cannot be read \(Cannot open .*c\.txt: it is a link that leads out of its folder/,
		),
		expect.stringMatching(/d\.png: its text cannot be read \(Cannot open .*d\.txt: it is not a regular file\)/),
	]);
	expect(JSON.stringify(membersOf(target))).not.toContain("root:");
});

test("an output that is a link to nowhere, and progress or locks that are pipes, are refused by name", async () => {
	const source = scratch.file("one.jsonl", '{"text": "a"}');
	const link = output();
	symlinkSync("nowhere", link);
	await expect(importing(source, link)).rejects.toThrow(
		`Cannot create --output ${link}: a file of that name is in the way.`,
	);
	for (const name of ["import.json", "writer-1.lock"]) {
		const folder = output();
		mkdirSync(folder);
		Bun.spawnSync(["mkfifo", join(folder, name)]);
		await expect(importing(source, folder)).rejects.toThrow(
			`Cannot open ${join(folder, name)}: it is not a regular file.`,
		);
	}
});

test("a table of a million columns is refused as quickly as it is read", async () => {
	const names = Array.from({ length: 1_000_000 }, (_, i) => `c${i}`);
	const table = (header: readonly string[]) => scratch.file("wide.csv", `${header.join()}\n${"x,".repeat(999_999)}x\n`);
	await expect(importing(table(names), output())).rejects.toThrow("c49; none is known to hold text");
	names[999_999] = "c7";
	await expect(importing(table(names), output())).rejects.toThrow('has the column "c7" twice');
}, 60_000);

test("the pages of a Parquet column may hold a gibibyte together", () => {
	/** A page of thrift's compact protocol: its kind, its size, the size that it claims to have unpacked, a value in plain bytes. */
	const page = (claimed: number) => {
		const bytes: number[] = [0x15, 0, 0x15];
		for (let rest = 2 * claimed; ; rest = Math.floor(rest / 128)) {
			bytes.push((rest % 128) + (rest < 128 ? 0 : 128));
			if (rest < 128) break;
		}
		return [...bytes, 0x15, 0, 0x2c, 0x15, 2, 0x15, 0, 0, 0];
	};
	const check = (...claims: number[]) => {
		const bytes = [...claims.flatMap(page), 0];
		using file = InputFile.open(scratch.file("pages", Uint8Array.from(bytes)));
		const sizes = { data_page_offset: 0n, total_compressed_size: BigInt(bytes.length), path_in_schema: [] };
		checkPages(file, { ...sizes, codec: "UNCOMPRESSED", type: "BYTE_ARRAY" } as never, []);
	};
	check(2 ** 29, 2 ** 29);
	expect(() => check(2 ** 29, 2 ** 29, 1)).toThrow("its pages hold too much");
});

describe("inputs that are refused in one sentence", () => {
	const named = (columns: Partial<Columns>) => ({
		columns: { images: null, text: null, question: null, answer: null, ...columns },
	});
	const cases: readonly (readonly [
		name: string,
		content: string | Uint8Array,
		message: string | RegExp,
		options?: Parameters<typeof importing>[2],
	])[] = [
		["empty.jsonl", "", "empty.jsonl is empty"],
		["words.json", "words", 'words.json begins with neither "[" nor "{"'],
		["open.json", '[{"text": "a"}, {"text": "b"}', /open.json, line 1 \(byte 29\): the list does not end/],
		["comma.json", '[{"text": "a"}\n{"text": "b"}]', /comma.json, line 2 .*: a comma is missing after an entry/],
		["behind.json", '[{"text": "a"}] {}', "the file continues after the list"],
		["empty.csv", "", "empty.csv is empty"],
		[
			"numbers.csv",
			"a,b\n1,2\n",
			"numbers.csv has the columns a, b; none is known to hold text: name the column with --text-column",
		],
		["bars.csv", "image|caption\na.png|b\n", "bars.csv has a single column image|caption: --delimiter names"],
		[
			"files.csv",
			"file,text\na.png,b\n",
			/^--image-root pictures: \S*files.csv has the columns file, text; none is known to hold images: name the column with --image-column\.$/,
			{ imageRoot: "pictures" },
		],
		["twice.csv", "a,a\n1,2\n", 'twice.csv has the column "a" twice'],
		["quote.csv", 'image,caption\na.png,x "y" z\n', /quote.csv is not a table: Invalid/],
		["latin.csv", Buffer.from("image,caption\na.png,caf\xe9\n", "latin1"), "latin.csv is not text in UTF-8"],
		["column.csv", "image,caption\na.png,b\n", "--text-column title: ", named({ text: "title" })],
		[
			"fake.parquet",
			"PAR1 and nothing",
			/fake.parquet cannot be read as Parquet: of its description, it does not end as Parquet does/,
		],
		["fake.arrow", "ARROW1 and nothing at all", /fake.arrow/],
		["notes.txt", "some words", /notes.txt is not a form of data that can be imported \(pictures: /],
		[
			"nothing.jsonl",
			'{"a": 1}\n',
			/No row of .*nothing.jsonl becomes a sample: .*nothing.jsonl, line 1: it has neither/,
		],
		[
			"base.csv",
			`image,text\n"data:,x",x\n`,
			/becomes a sample: .*base.csv, line 2: an image is a data URI that is not in base64\.$/,
		],
		["forced.csv", "a,b\n", /does not hold a folder of pictures/, { from: "pictures" }],
	];
	for (const [name, content, message, options] of cases) {
		test(name, async () => {
			await expect(importing(scratch.file(`bad/${name}`, content), output(), options)).rejects.toThrow(message);
		});
	}

	test("a missing path, a URL, an Energon data set", async () => {
		await expect(importing(join(scratch.path, "no"), output())).rejects.toThrow("no does not exist");
		await expect(importing("https://host/a.jsonl", output())).rejects.toThrow("is a URL");
		const set = output();
		await importing(scratch.file("one.jsonl", '{"text": "a"}'), set);
		await expect(importing(set, output())).rejects.toThrow("is an Energon data set already: `mimo train --data-path");
	});

	test("a block of LZ4 that is cut off, too short or too long", () => {
		const unpack = (bytes: readonly number[], length: number) => [
			...compressors.LZ4_RAW!(Uint8Array.from(bytes), length),
		];
		// A literal, 5 copies of it, and another literal.
		const block = [0x11, 7, 1, 0, 0x10, 8];
		expect(unpack(block, 7)).toEqual([7, 7, 7, 7, 7, 7, 8]);
		const far = [0x11, 7, 2, 0, 0x10, 8];
		for (const [bytes, length] of [
			[block, 6],
			[block, 8],
			[block.slice(0, -1), 7],
			[far, 7],
			[[0xf0], 15],
			[[0x10], 1],
		] as const)
			expect(() => unpack(bytes, length)).toThrow("an LZ4 block is damaged");
	});

	test("an invalid limit", () => {
		for (const text of ["", "x", "-1", "101%", "1.5", "1e3"])
			expect(() => parseSkipLimit(text)).toThrow("--skip-limit is ");
		expect([parseSkipLimit("0"), parseSkipLimit("2.5%")]).toEqual([{ rows: 0 }, { share: 0.025 }]);
	});
});

describe("forms are recognised", () => {
	test("files and folders", () => {
		const kinds = ["captions.parquet", "captions", "talk", "pictures", "."].map(
			(name) => detect(join(golden, name))?.kind,
		);
		expect(kinds).toEqual(["parquet", "arrow", "arrow", "pictures", "arrow"]);
		expect(detect(join(golden, "talk"))!.files.map(({ part }) => part)).toEqual(["train", "test"]);
		scratch.file("folder/metadata.jsonl", '{"file_name": "a.png", "text": "t"}\n');
		scratch.file("folder/a.png", picture);
		expect(detect(join(scratch.path, "folder"))!.kind).toBe("json");
		scratch.file("shards/0.tar", tar([["a.png", picture]]));
		scratch.file("shards/0.parquet", "PAR1");
		expect(detect(join(scratch.path, "shards"))!.kind).toBe("tar");
	});

	test("parts by the names of files", () => {
		const names = [
			"data/validation-00000-of-00002.parquet",
			"train.csv",
			"test/0.parquet",
			"training_set/x",
			"tester.csv",
			"00000.tar",
		];
		expect(names.map(partOf)).toEqual(["val", "train", "test", "train", null, null]);
	});
});

describe("JSON is divided into records without parsing", () => {
	test("lists of any shape, also across chunks", () => {
		const random = randomValues(400, 5);
		const values: unknown[] = Array.from(random, (value, i) => {
			if (i % 7 === 0) return value;
			if (i % 5 === 0) return `a "quoted\\" ${"]}[{,".repeat(1 + (i % 3))}\n`;
			return { i, nested: [[], {}, { a: [value, "x\\"] }], text: "é".repeat(i === 9 ? 2 ** 20 : i % 40) };
		});
		for (const space of [undefined, 1, "\t"]) {
			const path = scratch.file("any.json", `\ufeff ${JSON.stringify(values, null, space)}\n`);
			const records = [...jsonEntries(path, 0, 1)];
			expect(records.map(({ bytes }) => JSON.parse(Buffer.from(bytes!).toString()))).toEqual(values);
			const rest = [...jsonEntries(path, records[100]!.end, records[100]!.endLine)];
			expect(rest.map(({ line, end }) => [line, end])).toEqual(records.slice(101).map(({ line, end }) => [line, end]));
		}
	});

	test("a record of more than 64 MiB is skipped", () => {
		const path = scratch.file("long.jsonl", `{"text": "a"}\n{"text": "${"x".repeat(2 ** 26)}"}\n{"text": "b"}\n`);
		expect([...jsonLines(path, 0, 1)].map(({ bytes, line }) => [bytes?.length ?? null, line])).toEqual([
			[13, 1],
			[null, 2],
			[13, 3],
		]);
	});
});
