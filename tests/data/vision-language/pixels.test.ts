/** Resizing as Pillow 13 does it; the expected bytes are Pillow's. */
import { beforeAll, expect, test } from "bun:test";
import { imagePatches } from "../../../src/data/vision-language/pixels.ts";
import { clipStatistics, type Image, Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { png } from "../fixtures.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

const rgba =
	"iVBORw0KGgoAAAANSUhEUgAAAAUAAAAECAYAAABGM/VAAAAAX0lEQVR4nAFUAKv/AEQgggD95vHIazD5AMfdAciIdTSAAA8LDf8Ew27IDnHgyHewdhHrlAvIADNflwCq2GGAkf/J/xH1fMjUWLv/AL8s4P83U8mA+g/wAJ3JVxF0Bmb/q/4p1vMYz5EAAAAASUVORK5CYII=";
const palette =
	"iVBORw0KGgoAAAANSUhEUgAAAAcAAAAFBAMAAAB7tOvrAAAAElBMVEV2z7C064kCxEJp2hz2umbT+LaSmU0LAAAAIklEQVR4nGM0uuTwh1FZ9upvJsULuh+YeD68U2AU+sTHBwB/7wmQn4IOBQAAAABJRU5ErkJggg==";

for (const [name, width, height, file, expected] of [
	["RGBA", 3, 6, rgba, "//////B0oasPSXRnVqqxzKIACVAsD6HM3ZEucLEya/StkZeesVXTdP+pfluOmTPbAAD/cwBb"],
	[
		"RGBA of the same size",
		5,
		4,
		rgba,
		"RCCC/ebxazD5x90BiHU0DwsNBMNuDnHgd7B265QLM1+Xqthhkf/JEfV81Fi7vyzgN1PJ+g/wnclXdAZm",
	],
	["a palette", 4, 3, palette, "adocds+w9rpm9rpm9rpmtOuJ9rpmds+wtOuJds+wtOuJAsRC"],
	[
		"grey with alpha",
		2,
		5,
		"iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAQAAAAe/WZNAAAAJElEQVR4nGNUDtXTZeV0iGVY8u+TFc/8o+sZryesvf7XJGY+AHyCC1VDMOeyAAAAAElFTkSuQmCC",
		"MTExfHx8Z2dndnZ2nJycb29vqampdXV1sbGxhISE",
	],
	[
		"one bit",
		4,
		4,
		"iVBORw0KGgoAAAANSUhEUgAAAAkAAAACAQAAAACiLct+AAAADklEQVR4nGNQZmCYywAAAe8Awbs/ZCAAAAAASUVORK5CYII=",
		"AAAAAAAAAAAA////AAAAAAAAAAAA////AAAA////////////AAAA////////////",
	],
	[
		"grey",
		3,
		3,
		"iVBORw0KGgoAAAANSUhEUgAAAAUAAAACCAAAAAC1AUmBAAAAFElEQVR4nGPIkZijos5ipLN14xoAEzwD4PT16nAAAAAASUVORK5CYII=",
		"REREYmJiHh4ecnJycXFxZmZmn5+fgICArq6u",
	],
] as const) {
	test(`${name} is resized as Pillow resizes it`, () => {
		const [resized] = images.decodeResized(Buffer.from(file, "base64"), [{ width, height }], "energon");
		expect(Buffer.from(resized!.pixels).toString("base64")).toBe(expected);
	});
}

/** Weights of Pillow's antialiased bicubic filter for one output place: first source place and weights, sum 1. */
function bicubic(from: number, to: number, place: number): { first: number; weights: number[] } {
	const scale = from / to;
	const stretch = Math.max(scale, 1);
	const centre = (place + 0.5) * scale;
	const first = Math.max(0, Math.trunc(centre - 2 * stretch + 0.5));
	const end = Math.min(from, Math.trunc(centre + 2 * stretch + 0.5));
	const kernel = (x: number) => {
		const d = Math.abs(x);
		if (d < 1) return 1.5 * d ** 3 - 2.5 * d ** 2 + 1;
		return d < 2 ? -0.5 * d ** 3 + 2.5 * d ** 2 - 4 * d + 2 : 0;
	};
	const raw = Array.from({ length: end - first }, (_, i) => kernel((first + i - centre + 0.5) / stretch));
	const sum = raw.reduce((a, b) => a + b, 0);
	return { first, weights: raw.map((weight) => weight / sum) };
}

test("alpha weighs colours once: a float resize of premultiplied colours differs by rounding alone", () => {
	const [width, height, side] = [24, 20, 9];
	// Colours that alpha hides, beside colours it shows: weighing them twice, or not at all, is far off.
	const pixels = new Uint8Array(width * height * 4);
	for (let i = 0; i < pixels.length; i += 4) {
		const [x, y] = [(i / 4) % width, Math.floor(i / 4 / width)];
		pixels.set([200 - 4 * x, 40 + 6 * y, (x * y * 5) % 256, Math.min(255, 120 + 5 * x + 3 * y)], i);
	}
	const { pixels: found } = images.resize({ width, height, channels: 4, pixels }, { width: side, height: side });
	const value = (x: number, y: number, channel: number) => {
		const alpha = pixels[(y * width + x) * 4 + 3]! / 255;
		return channel === 3 ? alpha : alpha * pixels[(y * width + x) * 4 + channel]!;
	};
	const resized = (column: number, row: number, channel: number) => {
		const [across, down] = [bicubic(width, side, column), bicubic(height, side, row)];
		return down.weights.reduce(
			(sum, weight, j) =>
				sum + weight * across.weights.reduce((s, w, i) => s + w * value(across.first + i, down.first + j, channel), 0),
			0,
		);
	};
	let worst = 0;
	for (let row = 0; row < side; row++) {
		for (let column = 0; column < side; column++) {
			const alpha = resized(column, row, 3);
			for (let channel = 0; channel < 3; channel++) {
				const expected = Math.max(0, Math.min(255, resized(column, row, channel) / alpha));
				worst = Math.max(worst, Math.abs(expected - found[(row * side + column) * 4 + channel]!));
			}
		}
	}
	// Premultiplied values are rounded to bytes, between the passes too, and divided by an alpha of a half or more.
	expect(worst).toBeLessThan(4);
	expect(worst).toBeGreaterThan(0);
});

test("tiles are cut row by row, and the whole image follows", () => {
	const file = png(64, 32, 5);
	const tile = { width: 16, height: 16 };
	const size = { width: 32, height: 32 };
	const plan = { mode: "tiles", size, columns: 2, rows: 2, thumbnail: tile } as const;
	const image = { file, decoding: "energon", plan, statistics: clipStatistics } as const;
	const tiles = imagePatches(images, image, 16);
	const [whole, small] = images.decodeResized(file, [plan.size, tile], "energon") as [Image, Image];
	// A tile of one patch is a patch of the whole.
	const patches = images.patches(whole, 16, clipStatistics);
	expect(tiles.length).toBe(5);
	for (let i = 0; i < 4; i++) expect([...tiles[i]!]).toEqual([...patches.subarray(i * 768, (i + 1) * 768)]);
	expect([...tiles[4]!]).toEqual([...images.patches(small, 16, clipStatistics)]);
});
