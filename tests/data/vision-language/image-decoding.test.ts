/** Data sets whose images are decoded as Energon does and as transformers does, and what decides between them. */
import { afterAll, beforeAll, describe, expect, test } from "bun:test";
import { dirname } from "node:path";
import { defaultLoadOptions } from "../../../src/data/energon/dataset.ts";
import { raiseError } from "../../../src/data/energon/errors.ts";
import { defaultPrepareOptions, prepare } from "../../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../../src/data/energon/storage/open.ts";
import { byteTokenizer } from "../../../src/data/text/tokenizer.ts";
import { encodePng } from "../../../src/data/vision-language/pixels.ts";
import { imageLines, previewPage, previewSamples, spansOf } from "../../../src/data/vision-language/preview.ts";
import type { VisionLanguageTask } from "../../../src/data/vision-language/task.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { png, Scratch, tar, withOrientation } from "../fixtures.ts";
import { importing } from "../import/importing.ts";
import { smallTask } from "./task.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
const task: VisionLanguageTask = { ...smallTask, sequenceLength: 256, endId: null };
/** Stored 64 x 32, shown 32 x 64. */
const turned = withOrientation(png(64, 32, 5), 6);
let images: Images;
let imported: string;
let prepared: string;

beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
	scratch.file("pictures/a.png", turned);
	scratch.file("pictures/a.txt", "A picture.");
	imported = `${scratch.path}/imported`;
	await importing(`${scratch.path}/pictures`, imported);
	const members = [
		["a.png", turned],
		["a.json", '{"caption":"A picture."}'],
	] as const;
	prepared = dirname(scratch.file("prepared/0.tar", tar(members)));
	prepare(prepared, { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
});

function samplesOf(path: string, own: Partial<VisionLanguageTask> = {}, remark: (sentence: string) => void = () => {}) {
	return previewSamples(new LocalStorage(), images, byteTokenizer, {
		...{ path, load: defaultLoadOptions, seedOffset: 0, count: 1, onFailure: raiseError, remark },
		task: { ...task, ...own },
	});
}

/** How the first image of a data set is decoded, and its size then. */
function decoded(path: string, own: Partial<VisionLanguageTask> = {}): string {
	const { decoding, width, height } = samplesOf(path, own)[0]!.images[0]!;
	return `${decoding} ${width} x ${height}`;
}

function blendOf(name: string, path: string, subflavors: string): string {
	const reference = `{path: ${path}, subflavors: ${subflavors}}`;
	const head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n";
	return scratch.file(name, `${head}    blend:\n      - ${reference}\n`);
}

describe("images are decoded", () => {
	test("as Energon does in its data sets, as transformers does in imported ones", () => {
		expect(decoded(prepared)).toBe("energon 64 x 32");
		expect(decoded(imported)).toBe("transformers 32 x 64");
	});

	test("as the data set of a blend says, whose other settings add to those of the set", () => {
		const mean = "{mimo: {image-mean: [0.0, 0.0, 0.0]}, other: 1}";
		expect(decoded(blendOf("mean.yaml", imported, mean))).toBe("transformers 32 x 64");
		expect(samplesOf(blendOf("mean.yaml", imported, mean))[0]!.images[0]!.statistics.mean).toEqual([0, 0, 0]);
		expect(decoded(blendOf("other.yaml", imported, "{mimo: {image-decoding: energon}}"))).toBe("energon 64 x 32");
		expect(decoded(blendOf("own.yaml", prepared, "{mimo: {image-decoding: transformers}}"))).toBe(
			"transformers 32 x 64",
		);
		expect(() => decoded(blendOf("bad.yaml", prepared, "{mimo: {image-decoding: pillow}}"))).toThrow(
			'image-decoding of the subflavor mimo is "pillow"; allowed is',
		);
	});

	test("as the configuration says, in every data set", () => {
		expect(decoded(prepared, { imageDecoding: "transformers" })).toBe("transformers 32 x 64");
		expect(decoded(imported, { imageDecoding: "energon" })).toBe("energon 64 x 32");
	});
});

describe("a preview", () => {
	/** Pictures of its page, by what it calls them. */
	const pictures = (path: string, own: Partial<VisionLanguageTask> = {}) => {
		const page = previewPage(samplesOf(path, own), byteTokenizer, { ...task, ...own }, images);
		const found = page.matchAll(/<img class="[^"]*" alt="([^"]+)" src="data:image\/png;base64,([^"]+)">/g);
		return [...found].map(([, name, file]) => ({ name, ...images.decode(Buffer.from(file!, "base64")) }));
	};

	test("draws what the encoder gets of a picture, turned or as it is stored", () => {
		for (const [path, decoding, width, height] of [
			[imported, "transformers", 32, 64],
			[prepared, "energon", 64, 32],
		] as const) {
			const [expected] = images.decodeResized(turned, [{ width, height }], decoding);
			expect(pictures(path)).toEqual([{ name: "image 0", ...expected! }]);
		}
	});

	test("draws every tile, and the thumbnail", () => {
		const sizing = {
			...({ mode: "tiles", tileSize: 32, minTiles: 1, maxTiles: 4 } as const),
			...{ areaWeighted: false, thumbnail: true, tags: false },
		};
		const [upper, lower, small] = pictures(imported, { sizing });
		const sizes = [
			{ width: 32, height: 64 },
			{ width: 32, height: 32 },
		];
		const [whole, thumbnail] = images.decodeResized(turned, sizes, "transformers");
		expect([...upper!.pixels, ...lower!.pixels]).toEqual([...whole!.pixels]);
		expect(small).toEqual({ name: "image 0, tile 2", ...thumbnail! });
	});

	test("says that a picture is turned, or would be", () => {
		const line = (path: string) => {
			const [sample] = samplesOf(path);
			return imageLines(sample!, spansOf(sample!, byteTokenizer, task), task.tower)[0];
		};
		expect(line(imported)).toStartWith("image 0: 32 x 64 (turned by its EXIF orientation 6) -> 32 x 64 pixels");
		expect(line(prepared)).toStartWith("image 0: 64 x 32 (not turned by its EXIF orientation 6) -> 64 x 32 pixels");
	});

	test("names a picture that cannot be decoded", () => {
		const cut = dirname(
			scratch.file(
				"cut/0.tar",
				tar([
					["a.png", turned.subarray(0, turned.length - 40)],
					["a.json", '{"caption":"A picture."}'],
				]),
			),
		);
		prepare(cut, { ...defaultPrepareOptions, splitRatio: "1,0,0", sampleType: "CrudeWebdataset" });
		expect(previewPage(samplesOf(cut), byteTokenizer, task, images)).toContain("<p>image 0: the image ");
	});
});

test("greys of 16 bits are named: once by an import, sample by sample to a run", async () => {
	// As encodePng writes a grey picture of 8 bits, with the header and the row of one of 16.
	const narrow = encodePng({ width: 4, height: 1, channels: 1, pixels: Uint8Array.of(0, 1, 2, 3) });
	const wide = Buffer.from(narrow);
	wide[24] = 16;
	wide.writeUInt32BE(2, 16);
	wide.writeUInt32BE(Bun.hash.crc32(wide.subarray(12, 29)), 29);
	for (const name of ["a", "b"]) {
		scratch.file(`greys/${name}.png`, wide);
		scratch.file(`greys/${name}.txt`, "A picture.");
	}
	const said: string[] = [];
	const output = `${scratch.path}/greys-set`;
	await importing(`${scratch.path}/greys`, output, { report: (line) => said.push(line) });
	const warning =
		"is a PNG with greys of 16 bits: as in Pillow, all above 255 become white. Convert such files to 8 bits.";
	expect(said.filter((line) => line.startsWith("warning"))).toEqual([
		`warning: ${scratch.path}/greys/a.png ${warning}`,
	]);
	const remarks: string[] = [];
	samplesOf(output, {}, (sentence) => remarks.push(sentence));
	expect(remarks[0]).toMatch(
		/^An image of sample .*\/greys-set\/train-000000\.tar\/00000000[01] is a PNG with greys of 16 bits/,
	);
});
