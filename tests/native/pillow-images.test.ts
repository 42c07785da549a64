/** Image files of every kind against digests that Pillow 13 gave (pillow_images.py): the same pixels, the same refusals. */
import { beforeAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { type Channels, Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";

interface PillowFile {
	readonly name: string;
	/** Base64. */
	readonly file: string;
	readonly refused?: true;
	readonly size: readonly [width: number, height: number];
	readonly L: string;
	readonly RGB: string;
	readonly RGBA: string;
	/** Resized in the file's own mode, then converted to RGB. */
	readonly resized: readonly [width: number, height: number, digest: string];
}

type Resize = readonly [channels: Channels, ...sizes: [number, number, number, number], digest: string];

const pillow = (await Bun.file(join(import.meta.dir, "../golden/images/pillow.json")).json()) as {
	readonly files: readonly PillowFile[];
	readonly resizes: readonly Resize[];
};

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

const digest = (pixels: Uint8Array) => new Bun.CryptoHasher("sha256").update(pixels).digest("hex").slice(0, 24);

for (const format of ["JPEG", "PNG", "WebP", "GIF", "BMP"] as const) {
	describe(format, () => {
		for (const { name, file, refused, size, resized, ...digests } of pillow.files) {
			if (!name.startsWith(format)) continue;
			const bytes = new Uint8Array(Buffer.from(file, "base64"));
			if (refused) {
				test(`${name} is refused`, () => {
					expect(() => images.decode(bytes)).toThrow(/^the image (ends too early|is damaged \(.+\))$/);
				});
				continue;
			}
			test(name, () => {
				const [width, height] = size;
				expect(images.inspect(bytes)).toMatchObject({ format, width, height });
				expect(digest(images.decode(bytes, 1).pixels)).toBe(digests.L);
				expect(digest(images.decode(bytes, 3).pixels)).toBe(digests.RGB);
				expect(digest(images.decode(bytes, 4).pixels)).toBe(digests.RGBA);
				const [toWidth, toHeight, expected] = resized;
				const [smaller, same] = images.decodeResized(
					bytes,
					[
						{ width: toWidth, height: toHeight },
						{ width, height },
					],
					"energon",
				);
				expect(digest(smaller!.pixels)).toBe(expected);
				expect(digest(same!.pixels)).toBe(digests.RGB);
			});
		}
	});
}

/** The bytes that pillow_images.py gives a picture of that size. */
function noisePixels(width: number, height: number, channels: number): Uint8Array {
	let state = (width * 1000 + height) * 7 + channels;
	return Uint8Array.from({ length: width * height * channels }, () => {
		state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
		return (state >>> 16) & 255;
	});
}

test("120 random resizes, in the order of passes that Pillow 13 has", () => {
	let columnsFirst = 0;
	for (const [channels, width, height, toWidth, toHeight, expected] of pillow.resizes) {
		const image = { width, height, channels, pixels: noisePixels(width, height, channels) };
		const { pixels } = images.resize(image, { width: toWidth, height: toHeight });
		expect([width, height, toWidth, toHeight, digest(pixels)]).toEqual([width, height, toWidth, toHeight, expected]);
		const shrinks = height - toHeight;
		if (shrinks > 0 && shrinks > 2 * (width - toWidth)) columnsFirst++;
	}
	expect(columnsFirst).toBeGreaterThan(20);
});
