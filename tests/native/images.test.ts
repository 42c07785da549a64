import { beforeAll, describe, expect, test } from "bun:test";
import { deflateSync } from "node:zlib";
import { type Channels, clipStatistics, type Image, Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

function grey(rows: readonly (readonly number[])[]): Image {
	return { width: rows[0]!.length, height: rows.length, channels: 1, pixels: Uint8Array.from(rows.flat()) };
}

/** A PNG file with one IDAT of filter-free rows. */
function png(width: number, height: number, colourType: number, samples: readonly number[]): Uint8Array {
	const perPixel = { 0: 1, 2: 3, 4: 2, 6: 4 }[colourType]!;
	const given = Math.min(height, Math.ceil(samples.length / (width * perPixel)));
	const rows = Buffer.alloc(given * (1 + width * perPixel));
	for (let y = 0; y < given; y++) {
		rows.set(samples.slice(y * width * perPixel, (y + 1) * width * perPixel), y * (1 + width * perPixel) + 1);
	}
	const header = Buffer.alloc(13);
	header.writeUInt32BE(width, 0);
	header.writeUInt32BE(height, 4);
	header[8] = 8;
	header[9] = colourType;
	const chunk = (name: string, data: Uint8Array) => {
		const body = Buffer.concat([Buffer.from(name, "latin1"), data]);
		const length = Buffer.alloc(4);
		length.writeUInt32BE(data.length, 0);
		const checksum = Buffer.alloc(4);
		checksum.writeUInt32BE(Bun.hash.crc32(body), 0);
		return Buffer.concat([length, body, checksum]);
	};
	const zlib = deflateSync(rows);
	const parts = [chunk("IHDR", header), chunk("IDAT", zlib), chunk("IEND", Buffer.alloc(0))];
	return Buffer.concat([Buffer.from("\x89PNG\r\n\x1a\n", "latin1"), ...parts]);
}

describe("resize (golden G13)", () => {
	for (const [from, to] of [
		[
			[0, 50, 100, 255, 30, 80],
			[14, 102, 173, 53],
		],
		[
			[0, 255, 40],
			[0, 99, 255, 127, 24],
		],
		[
			[10, 200, 30, 255, 0, 90, 120, 60],
			[105, 110, 84],
		],
	] as const) {
		test(`${from.length} to ${to.length} pixels, along rows and columns`, () => {
			const row = images.resize(grey([from]), { width: to.length, height: 1 });
			const column = images.resize(grey(from.map((value) => [value])), { width: 1, height: to.length });
			expect([...row.pixels]).toEqual([...to]);
			expect([...column.pixels]).toEqual([...to]);
		});
	}

	test("both axes, horizontally first", () => {
		const image = grey([
			[0, 50, 100, 255],
			[30, 80, 200, 10],
			[255, 255, 0, 0],
			[5, 90, 180, 60],
			[120, 60, 240, 33],
			[7, 70, 77, 170],
		]);
		const narrowed = images.resize(image, { width: 3, height: 6 });
		const resized = images.resize(image, { width: 3, height: 4 });
		expect([...narrowed.pixels]).toEqual([9, 71, 220, 35, 148, 64, 255, 128, 0, 21, 142, 95, 95, 155, 94, 22, 72, 147]);
		expect([...resized.pixels]).toEqual([9, 98, 169, 169, 138, 20, 68, 148, 86, 49, 101, 129]);
	});

	test("channels do not mix, equal sizes are copied", () => {
		const pixels = Uint8Array.from([0, 255, 40].flatMap((value) => [value, 255 - value, 7]));
		const image: Image = { width: 3, height: 1, channels: 3, pixels };
		const wide = images.resize(image, { width: 5, height: 1 }).pixels;
		expect([...wide].filter((_, i) => i % 3 === 0)).toEqual([0, 99, 255, 127, 24]);
		expect([...wide].filter((_, i) => i % 3 === 2)).toEqual([7, 7, 7, 7, 7]);
		expect(images.resize(image, image).pixels).toEqual(pixels);
	});

	test("transparent pixels do not colour their neighbours", () => {
		const pixels = Uint8Array.of(200, 100, 0, 255, 0, 0, 0, 0, 200, 100, 0, 255, 0, 0, 0, 0);
		const half = images.resize({ width: 4, height: 1, channels: 4, pixels }, { width: 2, height: 1 }).pixels;
		for (const at of [0, 4]) {
			expect(half[at]!).toBeGreaterThan(190);
			expect(half[at + 3]!).toBeLessThan(200);
		}
	});
});

describe("normalize", () => {
	test("CLIP statistics (golden G14)", () => {
		const pixels = Uint8Array.from([0, 0, 0, 128, 128, 128, 255, 255, 255]);
		const planes = images.planes({ width: 3, height: 1, channels: 3, pixels }, clipStatistics);
		const expected = [
			[-1.7922625, 0.0763361, 1.9303363],
			[-1.7520971, 0.1688972, 2.0748838],
			[-1.4802198, 0.3399486, 2.145897],
		].flat();
		for (const [i, value] of expected.entries()) expect(Math.abs(planes[i]! - value)).toBeLessThan(2e-7);
	});

	test("patch vectors, channel first (golden G3)", () => {
		const pixels = new Uint8Array(4 * 6 * 3);
		for (let y = 0; y < 4; y++) {
			for (let x = 0; x < 6; x++) for (let c = 0; c < 3; c++) pixels[(y * 6 + x) * 3 + c] = 100 * c + 10 * y + x;
		}
		const unit = { mean: [0, 0, 0], deviation: [1 / 255, 1 / 255, 1 / 255] } as const;
		const vectors = [...images.patches({ width: 6, height: 4, channels: 3, pixels }, 2, unit)].map(Math.round);
		expect(vectors.slice(0, 12)).toEqual([0, 1, 10, 11, 100, 101, 110, 111, 200, 201, 210, 211]);
		expect(vectors.slice(12, 24)).toEqual([2, 3, 12, 13, 102, 103, 112, 113, 202, 203, 212, 213]);
		expect(vectors.slice(48, 60)).toEqual([22, 23, 32, 33, 122, 123, 132, 133, 222, 223, 232, 233]);
	});

	test("a size that is not a multiple of the patch is refused", () => {
		const image: Image = { width: 3, height: 2, channels: 3, pixels: new Uint8Array(18) };
		expect(() => images.patches(image, 2, clipStatistics)).toThrow("width % patch == 0");
	});
});

describe("decode", () => {
	const samples = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120];

	test("RGB, grey and RGBA of a colour PNG", () => {
		const file = png(2, 2, 2, samples);
		expect(images.inspect(file)).toEqual({
			...{ format: "PNG", width: 2, height: 2, channels: 3 },
			...{ orientation: 1, grey16: false },
		});
		expect([...images.decode(file).pixels]).toEqual(samples);
		const greys = [0, 3, 6, 9].map(
			(i) => (samples[i]! * 19595 + samples[i + 1]! * 38470 + samples[i + 2]! * 7471 + 32768) >> 16,
		);
		expect([...images.decode(file, 1).pixels]).toEqual(greys);
		expect([...images.decode(file, 4).pixels.slice(0, 8)]).toEqual([10, 20, 30, 255, 40, 50, 60, 255]);
	});

	test("alpha is dropped from RGB, grey is repeated", () => {
		expect([...images.decode(png(1, 2, 6, [1, 2, 3, 0, 4, 5, 6, 128])).pixels]).toEqual([1, 2, 3, 4, 5, 6]);
		expect([...images.decode(png(2, 1, 0, [9, 200])).pixels]).toEqual([9, 9, 9, 200, 200, 200]);
	});

	test("every cut into a file's picture is an error", () => {
		const file = png(2, 2, 2, samples);
		// Behind the picture: its two checksums and the chunk of the end.
		for (let length = 0; length < file.length - 20; length++) {
			expect(() => images.decode(file.subarray(0, length))).toThrow(/^the image /);
		}
	});

	for (const [what, bytes] of [
		["no content", new Uint8Array(0)],
		["text", Buffer.from("this is not an image at all")],
		["a JPEG marker alone", Uint8Array.of(0xff, 0xd8, 0xff, 0xd9, 0, 0, 0, 0)],
		["an enormous size", png(65535, 65535, 2, [])],
	] as const) {
		test(`${what} is refused by name`, () => {
			expect(() => images.decode(bytes)).toThrow(/^the image /);
		});
	}

	test("2000 damaged files are decoded or refused", () => {
		let state = 12345;
		const random = (below: number) => {
			state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
			return (state >>> 8) % below;
		};
		const original = png(
			4,
			3,
			2,
			Array.from({ length: 36 }, (_, i) => i * 7),
		);
		let refused = 0;
		const runs = process.env.MIMO_TEST_FULL ? 1_000_000 : 2000;
		for (let i = 0; i < runs; i++) {
			const file = Uint8Array.from(original);
			for (let k = 0; k <= random(4); k++) file[8 + random(file.length - 8)] = random(256);
			try {
				const { width, height, pixels } = images.decode(file, [1, 3, 4][random(3)] as Channels);
				expect(pixels.length % (width * height)).toBe(0);
			} catch (error) {
				expect((error as Error).name).toBe("UserError");
				refused++;
			}
		}
		expect(refused).toBeGreaterThan(runs / 4);
	});
});
