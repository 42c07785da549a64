/** Images of kinds that Pillow reads and mimo does not: leaving them out would be another order than Energon's. */
import { afterAll, beforeAll, expect, test } from "bun:test";
import { join } from "node:path";
import { decodeParts } from "../../src/data/energon/format/media.ts";
import { defaultLoaderConfiguration } from "../../src/data/energon/loader/configuration.ts";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { LocalStorage } from "../../src/data/energon/storage/open.ts";
import { inspectImage } from "../../src/data/vision-language/pixels.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { png, Scratch, tar } from "./fixtures.ts";
import { LocalLoader } from "./local-loader.ts";
import { smallTask } from "./vision-language/task.ts";

const tiff = Buffer.concat([Buffer.from("II*\0\x08\0\0\0", "latin1"), Buffer.alloc(64)]);
const scratch = new Scratch();
let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});
afterAll(() => scratch[Symbol.dispose]());

/** A set of eight captioned pictures, the sixth with these bytes. */
function captioned(name: string, sixth: Uint8Array): string {
	const members = Array.from({ length: 8 }, (_, i): [string, Uint8Array | string][] => [
		[`k${i}.webp`, i === 5 ? sixth : png(20, 20, i)],
		[`k${i}.txt`, "a picture"],
	]).flat();
	scratch.file(`${name}/shard.tar`, tar(members));
	const folder = join(scratch.path, name);
	prepare(folder, {
		...defaultPrepareOptions,
		splitRatio: "1,0,0",
		sampleType: "CaptioningSample",
		fieldMap: '{"image": "webp", "caption": "txt"}',
	});
	return folder;
}

/** Samples of eight batches of one; those that cannot be decoded are left out. */
function readAll(path: string): string[] {
	const configuration = { ...defaultLoaderConfiguration, path, task: smallTask, batchSize: 1, numWorkers: 1 };
	const errorHandler = (error: Error) => skipped.push(error.message);
	const skipped: string[] = [];
	const loader = new LocalLoader(configuration, new LocalStorage(), images, { errorHandler });
	for (let i = 0; i < 8; i++) loader.next();
	return skipped;
}

test("an image of an unsupported format ends the run, with sample, part and format", () => {
	const sentence =
		"Sample shard.tar/k5: the part webp cannot be read: the image is a TIFF; mimo reads JPEG, PNG, WebP, GIF and BMP.";
	expect(() => readAll(captioned("tiff", tiff))).toThrow(sentence);
});

test("a damaged image of a supported format is skipped", () => {
	const skipped = readAll(captioned("damaged", png(20, 20, 5).subarray(0, 40)));
	expect(skipped[0]).toContain("the image ends too early");
});

test("the format follows from the content, not from the name", () => {
	const parts = new Map([["jpg", new Uint8Array(png(3, 2))]]);
	const sample = { key: "k", shard: "s.tar", parts, sources: [] } as never;
	const { jpg } = decodeParts(sample, { images: (bytes) => inspectImage(images, bytes) });
	expect(jpg).toMatchObject({ width: 3, height: 2 });
});
