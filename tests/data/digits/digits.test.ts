/** Pictures of digit strings: what they show is what their captions say; bad files are named. */
import { afterAll, describe, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { configurationOf } from "../../../src/config/resolve.ts";
import { DigitData, endOfCaption, longestCaption } from "../../../src/data/digits/digit-data.ts";
import { readIdx } from "../../../src/data/digits/idx.ts";
import { drawAsText, drawPicture, largestPicture, readDigits } from "../../../src/data/digits/pictures.ts";
import { UserError } from "../../../src/native/errors.ts";

const side = 28;
const folder = mkdtempSync(join(tmpdir(), "mimo-digits-"));
afterAll(() => rmSync(folder, { recursive: true }));

function idx(shape: readonly number[], values: Uint8Array): Uint8Array {
	const header = Buffer.alloc(4 + 4 * shape.length);
	header.writeUInt32BE(0x0800 + shape.length);
	for (const [index, size] of shape.entries()) header.writeUInt32BE(size, 4 + 4 * index);
	return Buffer.concat([header, values]);
}

/** Twenty "digits": number i is a square of ink 10 · (i + 1), labelled i mod 10. Held-out ones are lighter by one. */
function writeDigits(prefix: string, ink: (i: number) => number): void {
	const pixels = new Uint8Array(20 * side * side);
	for (let i = 0; i < 20; i++) pixels.fill(ink(i), i * side * side, (i + 1) * side * side);
	writeFileSync(join(folder, `${prefix}-images-idx3-ubyte`), idx([20, side, side], pixels));
	writeFileSync(
		join(folder, `${prefix}-labels-idx1-ubyte`),
		idx(
			[20],
			Uint8Array.from({ length: 20 }, (_, i) => i % 10),
		),
	);
}
writeDigits("train", (i) => 10 * (i + 1));
writeDigits("t10k", (i) => 10 * (i + 1) - 1);

const words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];

test("a picture shows the digits that its caption spells, from left to right", () => {
	const digits = readDigits(folder, "train");
	const lengths = new Set<number>();
	const sizes = new Set<string>();
	for (let number = 0; number < 200; number++) {
		const picture = drawPicture(digits, 7, number, 16);
		const { height, width, pixels } = picture;
		expect([height % 16, width % 16]).toEqual([0, 0]);
		const largest = largestPicture(side, 16);
		expect(height <= largest.height && width <= largest.width).toBeTrue();
		// Ink of every column, repeats left out, background left out: one value a digit.
		const inks: number[] = [];
		let before = 0;
		for (let x = 0; x < width; x++) {
			const ink = Math.max(...Array.from({ length: height }, (_, y) => pixels[y * width + x]!));
			if (ink !== before && ink > 0) inks.push(ink);
			before = ink;
		}
		const said = picture.caption.split(" ").map((word) => words.indexOf(word));
		expect(said).toHaveLength(picture.digits);
		// Two equal digits may touch; then their inks are one.
		if (inks.length === said.length) expect(inks.map((ink) => (ink / 10 - 1) % 10)).toEqual(said);
		lengths.add(picture.digits);
		sizes.add(`${height} × ${width}`);
	}
	expect([...lengths].sort()).toEqual([1, 2, 3, 4]);
	expect(sizes.size).toBeGreaterThan(8);
});

test("held-out pictures show no digit of the training's", () => {
	const [training, heldOut] = [readDigits(folder, "train"), readDigits(folder, "held out")];
	const inks = (digits: typeof training) => new Set(digits.pixels);
	expect([...inks(training)].filter((ink) => inks(heldOut).has(ink))).toEqual([]);
});

describe("microbatches", () => {
	const keys = {
		preset: "nemotron-vlm-tiny",
		"dataset-provider": "digits",
		"data-path": folder,
		"llm-offset": 0,
	};
	const both = { wantsText: true, wantsImages: true };

	test("image tokens match the images, and the caption is predicted from the last of them on", () => {
		const c = configurationOf(keys);
		const data = new DigitData(c, "train");
		const { text, images } = data.microbatch({ first: 3, count: 5 }, both);
		let begin = 0;
		for (const [sample, length] of text.lengths.entries()) {
			const ids = text.ids.subarray(begin, begin + length);
			const labels = text.labels.subarray(begin, begin + length);
			const tokens = ids.filter((id) => id === c.imageTokenId).length;
			const grid = images.grids[sample]!;
			expect(tokens).toBe((grid.rows * grid.columns) / 4);
			const caption = [...labels].filter((label) => label !== -100);
			expect(caption.at(-1)).toBe(endOfCaption);
			expect(caption.length).toBeLessThanOrEqual(longestCaption);
			expect(new TextDecoder().decode(Uint8Array.from(caption.slice(0, -1)))).toBe(data.picture(3 + sample).caption);
			expect([...ids.subarray(tokens)]).toEqual(caption.slice(0, -1));
			begin += length;
		}
		expect(images.imagesPerSample).toEqual([1, 1, 1, 1, 1]);
		const prompts = data.prompts({ first: 3, count: 5 }, both);
		expect(prompts.images.patches).toEqual(images.patches);
		expect(prompts.text.ids.every((id) => id === c.imageTokenId)).toBeTrue();
	});

	test("tensor-parallel ranks get sequences they can cut", () => {
		const data = new DigitData(configurationOf({ ...keys, "llm-offset": 1, "llm-tp": 2 }), "train");
		const { text } = data.microbatch({ first: 0, count: 9 }, both);
		for (const length of text.lengths) expect(length % 2).toBe(0);
	});

	test("sequences that are too short are refused", () => {
		const c = configurationOf({ ...keys, "seq-length": 32 });
		expect(() => new DigitData(c, "train")).toThrow(/^seq-length is 32, but the largest picture of digits makes 27 /);
	});
});

test("files that are not there, or are no digits, are named", () => {
	const path = join(folder, "damaged");
	expect(() => readIdx(path, 3)).toThrow(UserError);
	expect(() => readIdx(path, 3)).toThrow(/damaged cannot be read \(ENOENT\); the digits come with `npm run setup`/);
	writeFileSync(path, idx([4], new Uint8Array(4)));
	expect(() => readIdx(path, 3)).toThrow(/is no IDX file of unsigned bytes in 3 dimensions/);
	writeFileSync(path, idx([2, 3], new Uint8Array(5)));
	expect(() => readIdx(path, 2)).toThrow(/holds 5 values; its header says 2 × 3/);
});

test("a picture can be drawn in characters", () => {
	const picture = { height: 4, width: 4, pixels: Uint8Array.of(...new Array(16).fill(255)), caption: "", digits: 1 };
	expect(drawAsText(picture)).toEqual(["@@"]);
});
