/** Images that samples name: in auxiliary data, among their own parts, and in documents of OBELICS and MMC4. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { defaultLoadOptions, loadDatasets } from "../../../src/data/energon/dataset.ts";
import { openFileStore, parseAux } from "../../../src/data/energon/format/file-store.ts";
import { defaultPrepareOptions, prepare } from "../../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { lint } from "../../../src/data/energon/tools/lint.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { checkTrainable, cutOff } from "../../../src/data/vision-language/dataset-checks.ts";
import { inspectImage } from "../../../src/data/vision-language/pixels.ts";
import { previewSamples } from "../../../src/data/vision-language/preview.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { type Member, png, Scratch, tar } from "../fixtures.ts";
import { smallTask } from "./task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const storage = new LocalStorage();
let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

/** A prepared data set of one shard. */
function set(
	name: string,
	members: readonly Member[],
	sampleType = "CrudeWebdataset",
	fieldMap: object | null = null,
): string {
	const folder = join(scratch.file(`${name}/0.tar`, tar(members)), "..");
	const typed = { sampleType, fieldMap: fieldMap === null ? null : JSON.stringify(fieldMap) };
	prepare(folder, { ...defaultPrepareOptions, splitRatio: "1,0,0", forceOverwrite: true, ...typed });
	return folder;
}

/** Sizes of the images of every sample that training gets, and why others are left out. */
function trained(path: string): {
	readonly sizes: Record<string, string[]>;
	readonly failures: string[];
	readonly text: string;
} {
	const failures: string[] = [];
	const samples = previewSamples(storage, images, byteTokenizer, {
		path,
		load: defaultLoadOptions,
		task: { ...smallTask, sequenceLength: 256, endId: null },
		seedOffset: 0,
		count: 100,
		onFailure: (error) => failures.push(error.message),
		remark: () => {},
	});
	const entries = samples.map(
		({ key, images: own }) => [key, own.map(({ width, height }) => `${width}x${height}`)] as const,
	);
	const text = samples.map(({ ids }) => byteTokenizer.decode([...ids].filter((id) => id < 256))).join("|");
	return { sizes: Object.fromEntries(entries), failures: [...new Set(failures)], text };
}

function problems(path: string, check: Parameters<typeof lint>[2]["check"] = null): string[] {
	const found: string[] = [];
	const decode = (bytes: Uint8Array) => inspectImage(images, bytes);
	lint(storage, path, { images: decode, check }, ({ what }) => found.push(what));
	return found;
}

const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n";

describe("auxiliary data", () => {
	const lines = [
		{
			image: "one.png",
			conversations: [
				{ from: "human", value: "<image> a?" },
				{ from: "gpt", value: "A." },
			],
		},
		{
			images: ["deep/two.png", "one.png"],
			messages: [
				{ role: "user", content: "b?" },
				{ role: "assistant", content: "B." },
			],
		},
		{ text: "only words" },
		{ image: "../secret.png", caption: "leads out" },
		{ image: "none.png", caption: "is not there" },
	];
	beforeAll(() => {
		scratch.file("images/one.png", png(32, 16));
		scratch.file("images/deep/two.png", png(16, 48));
		scratch.file("secret.png", png(16, 16));
		prepare(scratch.file("rows.jsonl", lines.map((line) => JSON.stringify(line)).join("\n")), defaultPrepareOptions);
		set("store", [
			["one.png", png(32, 16)],
			["deep/two.png", png(16, 48)],
			["deep/two.txt", "x"],
		]);
	});

	for (const [name, aux] of [
		["a folder", "filesystem://images"],
		["a prepared data set", "store"],
	] as const) {
		test(`of ${name}, for records of JSONL`, () => {
			const path = scratch.file(`${name}.yaml`, `${head}    path: rows.jsonl\n    aux: {pictures: "${aux}"}\n`);
			const { sizes, failures } = trained(path);
			expect(sizes).toEqual({ "0": ["32x16"], "1": ["16x48", "32x16"], "2": [] });
			expect(failures.sort()).toEqual([
				'Sample 3 names the image "../secret.png", which its auxiliary data (pictures) do not have.',
				'Sample 4 names the image "none.png", which its auxiliary data (pictures) do not have.',
			]);
			expect(problems(path)).toEqual(expect.arrayContaining(failures));
			expect(problems(path)).toHaveLength(2);
			checkTrainable(loadDatasets(storage, path, null, defaultLoadOptions).datasets, smallTask);
		});
	}

	test("for crude samples of tars, with several stores", () => {
		set("records", [["a.json", JSON.stringify(lines[1])]]);
		const path = scratch.file(
			"several.yaml",
			`${head}    path: records\n    aux: {empty: "filesystem://records", pictures: store}\n`,
		);
		expect(trained(path).sizes).toEqual({ a: ["16x48", "32x16"] });
	});

	test("are refused for typed samples, joins, other protocols, and missing paths", () => {
		set(
			"typed",
			[
				["a.png", png(16, 16)],
				["a.txt", "x"],
			],
			"CaptioningSample",
			{ image: "png", caption: "txt" },
		);
		const load = (text: string) => () =>
			loadDatasets(storage, scratch.file("refused.yaml", head + text), null, defaultLoadOptions);
		expect(load('    path: typed\n    aux: {a: "filesystem://images"}\n')).toThrow("which only crude samples can use");
		expect(load('    path: rows.jsonl\n    aux: {a: "filesystem+msc://images"}\n')).toThrow(
			"the multi-storage client is not built yet",
		);
		expect(load('    path: rows.jsonl\n    aux: {a: "filesystem://nothing"}\n')).toThrow(
			/aux a: the folder .*nothing does not exist/,
		);
		expect(load("    path: rows.jsonl\n    aux: {a: images}\n")).toThrow(/aux a: .*images is not prepared/);
	});

	test("names that are not files have no image", () => {
		for (const reference of ["filesystem://images", "store"]) {
			const store = openFileStore(storage, "a", parseAux(reference, scratch.path, "aux a"));
			for (const name of ["", ".", "..", "a\0b", "/etc/hostname", "deep", "one", "' OR 1=1 --.png"])
				expect(store.read(name)).toBeNull();
			expect(store.read("one.png")!.length).toBeGreaterThan(20);
		}
	});
});

describe("several images of a field_map", () => {
	const parts: readonly Member[] = [
		["a.img2.png", png(16, 32)],
		["a.img10.png", png(48, 16)],
		["a.txt", "both"],
		[
			"a.json",
			JSON.stringify({
				sequence: ["one", "img10.png", "two", { image: "a.img2.png" }],
				images: ["img10.png", "img2.png"],
				texts: ["x", "y"],
			}),
		],
	];

	test("by a pattern, numbers as numbers", () => {
		const folder = set("pattern", parts, "CaptioningSample", { image: "img*.png", caption: "txt" });
		expect(trained(folder).sizes).toEqual({ a: ["16x32", "48x16"] });
	});

	test("by lists that name parts", () => {
		const sequence = set("sequence", parts, "InterleavedSample", { sequence: "json[sequence]" });
		const found = trained(sequence);
		expect([found.sizes, found.text]).toEqual([{ a: ["48x16", "16x32"] }, "onetwo"]);
		const similar = set("similar", parts, "SimilarityInterleavedSample", {
			images: "json[images]",
			texts: "json[texts]",
		});
		expect(trained(similar).sizes).toEqual({ a: ["48x16", "16x32"] });
	});

	test("a missing part is named", () => {
		const members: readonly Member[] = [
			["a.json", JSON.stringify({ sequence: ["one", { image: "no.png" }] })],
			["b.json", '{"sequence": ["fine"]}'],
		];
		const folder = set("missing", members, "InterleavedSample", { sequence: "json[sequence]" });
		expect(trained(folder).failures).toEqual(['Sample a names the image part "no.png", which it does not have.']);
	});
});

describe("documents", () => {
	test("of OBELICS and MMC4, by the names of their images or in their order", () => {
		const pictures = (key: string): Member[] => [
			[`${key}.0.png`, png(16, 32)],
			[`${key}.1.png`, png(48, 16)],
		];
		const mmc4 = {
			text_list: ["first", "second"],
			image_info: [
				{ image_name: "1.png", matched_text_index: 0 },
				{ image_name: "0.png", matched_text_index: 1 },
			],
		};
		const folder = set("documents", [
			...pictures("a"),
			[
				"a.json",
				JSON.stringify({ texts: ["one", null, null], images: [null, "https://host/x.jpg", "https://host/y.jpg"] }),
			],
			...pictures("b"),
			["b.json", JSON.stringify(mmc4)],
			...pictures("c"),
			["c.json", JSON.stringify({ texts: ["one", null], images: [null, "https://host/x.jpg"] })],
		]);
		const { sizes, failures, text } = trained(folder);
		expect(sizes).toEqual({ a: ["16x32", "48x16"], b: ["48x16", "16x32"] });
		expect(text).toBe("one|first\nsecond");
		expect(failures).toEqual(["Sample c cannot be trained on: its document has 1 image and it has 2."]);
	});
});

test("lint reports samples that training skips, and with a configuration samples that it truncates", () => {
	const talk = (...turns: readonly (readonly [string, string])[]) =>
		JSON.stringify({ conversations: turns.map(([from, value]) => ({ from, value })) });
	const folder = set("stumbles", [
		["a.json", talk(["human", "<image>?"], ["gpt", "x"])],
		["b.json", talk(["human", "?"], ["gpt", ""])],
		["c.json", talk(["human", "?"])],
		["d.json", JSON.stringify({ conversations: [{ value: "?" }] })],
		["e.json", talk(["human", "?"], ["gpt", "long ".repeat(60)])],
		["f.json", talk(["human", "<image>?"], ["gpt", "x"], ["human", "<image>"], ["gpt", "y"])],
		["f.0.png", png(64, 64)],
		["f.1.png", png(64, 64)],
		["g.json", talk(["human", "?"], ["gpt", "fine"])],
	]);
	const common = [
		expect.stringContaining("Sample a cannot be trained on: it has 1 <image> tag and 0 images"),
		"Sample b cannot be trained on: its answer is empty.",
		"Sample c cannot be trained on: it has no turn of an assistant, so nothing is learned from it.",
		expect.stringContaining("Sample d cannot be trained on: its conversation has a turn of no speaker"),
	];
	expect(problems(folder)).toEqual(common);
	const task = { ...smallTask, sequenceLength: 16, sizing: { mode: "fixed", width: 96, height: 96 } } as const;
	expect(problems(folder, cutOff(task, byteTokenizer))).toEqual([
		...common,
		"Sample e: it has 303 tokens of text and 0 of images, and is cut at 16 (--seq-length).",
		"Sample f: 1 of its 2 images do not fit into 16 tokens (--seq-length).",
	]);
});
