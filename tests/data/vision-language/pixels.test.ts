/** Resizing as Pillow 13 does it; the expected bytes are Pillow's. */
import { beforeAll, expect, test } from "bun:test";
import { imagePatches, resizedImage } from "../../../src/data/vision-language/pixels.ts";
import { clipStatistics, Images } from "../../../src/native/images.ts";
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
		const { pixels } = resizedImage(images, Buffer.from(file, "base64"), { width, height });
		expect(Buffer.from(pixels).toString("base64")).toBe(expected);
	});
}

test("tiles are cut row by row, and the whole image follows", () => {
	const file = png(64, 32, 5);
	const tile = { width: 16, height: 16 };
	const plan = { size: { width: 32, height: 32 }, columns: 2, rows: 2, thumbnail: tile };
	const tiles = imagePatches(images, file, plan, 16, clipStatistics);
	const whole = resizedImage(images, file, plan.size);
	// A tile of one patch is a patch of the whole.
	const patches = images.patches(whole, 16, clipStatistics);
	expect(tiles.length).toBe(5);
	for (let i = 0; i < 4; i++) expect([...tiles[i]!]).toEqual([...patches.subarray(i * 768, (i + 1) * 768)]);
	expect([...tiles[4]!]).toEqual([...images.patches(resizedImage(images, file, tile), 16, clipStatistics)]);
});
