/** Output of `mimo data info`, `lint`, `preview` and `bench` for small data sets. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultLoadOptions } from "../../../src/data/energon/dataset.ts";
import { raiseError } from "../../../src/data/energon/errors.ts";
import { defaultPrepareOptions, prepare } from "../../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { benchmark } from "../../../src/data/energon/tools/bench.ts";
import { describeDataset } from "../../../src/data/energon/tools/describe.ts";
import { type LintOptions, lint, type Problem } from "../../../src/data/energon/tools/lint.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { inspectImage } from "../../../src/data/vision-language/pixels.ts";
import {
	headline,
	imageLines,
	previewPage,
	previewSamples,
	spansOf,
} from "../../../src/data/vision-language/preview.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { captions, png, Scratch, tar } from "../fixtures.ts";
import { smallTask } from "../vision-language/task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const storage = new LocalStorage();
let images: Images;
let folder: string;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
	folder = captions(scratch, "set", [7, 5, 9, 4], "2,1,1");
});

describe("info", () => {
	test("a folder: parts, shards, samples, types", () => {
		const found = describeDataset(storage, folder);
		expect([found.kind, found.sampleType, found.shards, found.samples]).toEqual([
			"webdataset",
			"CaptioningSample",
			4,
			25,
		]);
		expect(found.parts).toEqual([
			{ part: "train", shards: 2, samples: 12, excluded: 0 },
			{ part: "val", shards: 1, samples: 9, excluded: 0 },
			{ part: "test", shards: 1, samples: 4, excluded: 0 },
		]);
		expect(found.fields).toEqual({ image: "png", caption: "txt" });
		expect(found.hasKeyIndex).toBe(true);
	});

	test("a metadataset: every data set with its weight and subset", () => {
		const items = `      - path: set\n        weight: 3\n      - path: set\n        weight: 1\n        split_part: val\n        subset: {range: [2, 5]}\n`;
		const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n";
		const path = scratch.file("blend.yaml", head + items);
		const { leaves, samples } = describeDataset(storage, path);
		expect(leaves.map(({ splitPart, used, weight }) => [splitPart, used, weight])).toEqual([
			["train", 12, 0.75],
			["val", 3, 0.25],
		]);
		expect(samples).toBe(15);
	});
});

describe("lint", () => {
	const decodeImage = (bytes: Uint8Array) => {
		images.decode(bytes);
		return inspectImage(images, bytes);
	};
	function problems(path: string, check: LintOptions["check"] = null): Problem[] {
		const found: Problem[] = [];
		const { problems: count } = lint(storage, path, { images: decodeImage, check }, (problem) => found.push(problem));
		expect(count).toBe(found.length);
		return found;
	}

	test("a sound data set has no problems", () => expect(problems(folder)).toEqual([]));

	test("every kind of damage is named with its shard and sample", () => {
		const damaged = captions(scratch, "damaged", [3, 3, 3, 3]);
		const change = (name: string, edit: (bytes: Buffer) => Buffer | undefined) => {
			const path = join(damaged, name);
			const bytes = readFileSync(path);
			writeFileSync(path, edit(bytes) ?? bytes);
		};
		change("damaged-000.tar", (bytes) => void bytes.fill(0xee, bytes.indexOf("IDAT") + 4, bytes.indexOf("IDAT") + 20));
		change("damaged-001.tar.idx", (bytes) => Buffer.concat([bytes, Buffer.from("abc")]));
		change("damaged-002.tar.idx", (bytes) => void bytes.writeUInt32LE(512, 8));
		change(".nv-meta/.info.json", (bytes) => Buffer.from(bytes.toString().replace(/("damaged-003.tar": )3/, "$14")));
		change(".nv-meta/split.yaml", (bytes) =>
			Buffer.from(bytes.toString().replace("exclude", "  more: [x.tar]\nexclude")),
		);
		const found = problems(damaged).map(({ where, key, what }) => `${where.split("/").at(-1)} ${key}: ${what}`);
		for (const expected of [
			/^damaged-000.tar damaged000000: .*the part png cannot be decoded/,
			/^damaged-001.tar null: the index has 3 bytes too many$/,
			/^damaged-002.tar null: the index has 512 as entry 1, the tar has /,
			/^damaged-002.tar sample 1: .* is broken at sample 1, bytes 512 to /,
			/^damaged-003.tar null: the tar has 3 samples, .info.json says 4$/,
			/^split.yaml null: the part more names the shard x.tar, which was not prepared$/,
		]) {
			expect(found.filter((line) => expected.test(line))).toHaveLength(1);
		}
	});

	test("crude samples of videos, and those that name images which are not parts", () => {
		const members = [
			["a.mp4", "x"],
			["a.txt", "A video."],
			["b.json", '{"image": "b.jpg", "caption": "no part"}'],
			["c.json", '{"image": "c.png", "caption": "a part"}'],
			["c.png", png(4, 4)],
		] as const;
		const path = join(scratch.file("media/0.tar", tar(members)), "..");
		prepare(path, { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
		expect(problems(path).map(({ key, what }) => [key, what])).toEqual([
			["a", "Sample a cannot be trained on: its part mp4 is a video, and video is not built yet."],
			["b", expect.stringContaining('its field image names "b.jpg", but it has no image part')],
		]);
	});

	test("JSONL records that are not JSON", () => {
		const path = scratch.file("facts.jsonl", '{"text": "a"}\n{broken}\n{"text": "b"}\n');
		prepare(path, defaultPrepareOptions);
		expect(problems(path).map(({ key }) => key)).toEqual(["1"]);
	});
});

test("preview: text, what counts, image sizes and places", () => {
	const json = JSON.stringify({
		conversations: [
			{ from: "human", value: "<image>What is <b>?" },
			{ from: "gpt", value: "A dot." },
		],
	});
	const path = scratch.file(
		"talk/0.tar",
		tar([
			["a.json", json],
			["a.png", png(64, 32, 5)],
		]),
	);
	prepare(join(path, ".."), { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
	const task = { ...smallTask, template: "chatml", endId: null } as const;
	const options = {
		path: join(path, ".."),
		load: defaultLoadOptions,
		task,
		seedOffset: 0,
		count: 3,
		onFailure: raiseError,
		remark: () => {},
	};
	const samples = previewSamples(storage, images, byteTokenizer, options);
	expect(samples).toHaveLength(1);
	const [sample] = samples as [(typeof samples)[0]];
	const spans = spansOf(sample, byteTokenizer, task);
	expect(spans.map((span) => ("image" in span ? [span.image, span.begin, span.rows] : [span.text, span.loss]))).toEqual(
		[
			["<|im_start|>user\n", false],
			[0, 17, 2],
			["What is <b>?<|im_end|>\n<|im_start|>assistant\n", false],
			["A dot.<|im_end|>", true],
			["\n", false],
		],
	);
	expect(imageLines(sample, spans, task.tower)).toEqual([
		"image 0: 64 x 32 -> 64 x 32 pixels, 4 x 2 patches, 2 rows at tokens 17 to 18",
	]);
	expect(headline(sample, 96)).toEndWith("/0.tar/a: 81 tokens of 96, 16 in the loss");
	const page = previewPage(samples, byteTokenizer, task, images);
	expect(page).toContain("What is &lt;b&gt;?");
	expect(page).toContain("<b>A dot.&lt;|im_end|&gt;</b>");
	expect(page).toContain(`src="data:image/png;base64,${png(64, 32, 5).toString("base64")}"`);
	expect(page).not.toContain("<script");
	// Its own style sheet, and images within it.
	const [, style] = /<style>(.*?)<\/style>/s.exec(page)!;
	const hash = new Bun.CryptoHasher("sha256").update(style!).digest("base64");
	const policy = `default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; style-src 'sha256-${hash}'`;
	expect(page).toContain(`<meta http-equiv="Content-Security-Policy" content="${policy}">`);
});

test("bench counts samples, bytes and memory", async () => {
	const common = { splitPart: "train", workers: 2, threads: 1, seconds: 0.3, memoryBytes: 1e7, batchSize: 4 };
	const raw = await benchmark(folder, { ...common, task: { kind: "raw" } });
	expect(raw.samples).toBeGreaterThan(20);
	expect(raw.samplesPerSecond * 0.2).toBeLessThan(raw.samples);
	expect(raw.firstSampleSeconds).toBeGreaterThan(0);
	expect(raw.anonymousBytes).toBeGreaterThan(1e6);
});
