/** Files that promise less or more than they hold: memory and time are bounded by the header. */
import { beforeAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { deflateSync } from "node:zlib";
import { Images, imageFormats, UnreadImageError } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { sanitized } from "../sanitizer.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

function chunk(name: string, data: Uint8Array): Buffer {
	const body = Buffer.concat([Buffer.from(name, "latin1"), data]);
	const [length, checksum] = [Buffer.alloc(4), Buffer.alloc(4)];
	length.writeUInt32BE(data.length);
	checksum.writeUInt32BE(Bun.hash.crc32(body));
	return Buffer.concat([length, body, checksum]);
}

/** A PNG whose header and picture need not fit; grey of 8 bits unless given. `before`: chunks before the picture. */
function png(
	width: number,
	height: number,
	picture: Uint8Array,
	{ depth = 8, colours = 0, before = [] as readonly Uint8Array[] } = {},
): Uint8Array {
	const header = Buffer.alloc(13);
	header.writeUInt32BE(width, 0);
	header.writeUInt32BE(height, 4);
	header[8] = depth;
	header[9] = colours;
	const signature = Buffer.from("\x89PNG\r\n\x1a\n", "latin1");
	const parts = [chunk("IHDR", header), ...before, chunk("IDAT", picture), chunk("IEND", Buffer.alloc(0))];
	return new Uint8Array(Buffer.concat([signature, ...parts]));
}

/** Most resident memory of this process since it started, in MiB. */
const peak = () =>
	Number(/VmHWM:\s+(\d+)/.exec(require("node:fs").readFileSync("/proc/self/status", "utf8"))![1]) / 1024;

/** The error of an action, or null; its peak of memory in MiB above the earlier level; its processor seconds. */
function cost(action: () => unknown): { thrown: string | null; megabytes: number; seconds: number } {
	const before = peak();
	const used = process.cpuUsage();
	let thrown: string | null = null;
	try {
		action();
	} catch (error) {
		thrown = (error as Error).message;
	}
	const { user, system } = process.cpuUsage(used);
	return { thrown, megabytes: peak() - before, seconds: (user + system) / 1e6 };
}

/** 256 MiB of zeros in a quarter of a MiB. */
const bomb = deflateSync(Buffer.alloc(2 ** 28));

test("a picture that is larger than its header says is refused, and not inflated", () => {
	const file = png(16, 16, bomb);
	const { thrown, megabytes, seconds } = cost(() => images.decode(file));
	expect(thrown).toBe("the image is damaged (its picture has more rows than its header says)");
	expect(megabytes).toBeLessThan(32);
	expect(seconds).toBeLessThan(0.5);
});

test("a header with more pixels than the file can hold allocates no memory", () => {
	const file = png(13000, 13000, deflateSync(Buffer.alloc(1000)));
	const { thrown, megabytes } = cost(() => images.decodeResized(file, [{ width: 8, height: 8 }], "energon"));
	expect(thrown).toBe("the image ends too early");
	expect(megabytes).toBeLessThan(32);
});

test("text and colour profiles are not decompressed", () => {
	const rows = deflateSync(Buffer.from([0, 7, 9, 0, 1, 2]));
	const text = chunk("zTXt", Buffer.concat([Buffer.from("a\0\0"), bomb]));
	const profile = chunk("iCCP", Buffer.concat([Buffer.from("a\0\0"), bomb]));
	const file = png(2, 2, rows, { before: [text, profile] });
	const { thrown, megabytes } = cost(() => expect([...images.decode(file, 1).pixels]).toEqual([7, 9, 1, 2]));
	expect(thrown).toBeNull();
	expect(megabytes).toBeLessThan(32);
});

test("EXIF and texts that stand for much cost little, and the picture stays as it is stored", () => {
	const rows = deflateSync(Buffer.from([0, 7, 9, 0, 1, 2]));
	const profile = Buffer.concat([Buffer.from("Raw profile type exif\0\0"), bomb]);
	const xmp = Buffer.concat([Buffer.from("XML:com.adobe.xmp\0\x01\0\0\0"), bomb]);
	/** A directory at byte 8 of `entries` entries, as many as there are or more; its end leads to itself. */
	const directory = (entries: number, held: number, entry: readonly number[]) =>
		Uint8Array.from([
			...[0x4d, 0x4d, 0, 0x2a, 0, 0, 0, 8, entries >> 8, entries & 255],
			...Array.from({ length: held }, () => entry).flat(),
			...[0, 0, 0, 8],
		]);
	const other = [0x87, 0x69, 0, 4, 0, 0, 0, 1, 0, 0, 0, 8];
	const far = [0x01, 0x12, 0, 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
	const chunks = {
		"texts that are bombs": Array.from({ length: 50 }, () => [chunk("zTXt", profile), chunk("iTXt", xmp)]).flat(),
		"a directory that holds itself": [chunk("eXIf", directory(65_535, 1000, other))],
		"values behind the end": [chunk("eXIf", directory(1000, 1000, far))],
		"many small texts": Array.from({ length: 20_000 }, () => chunk("tEXt", Buffer.from("Raw profile type exif\0\n"))),
		"EXIF of 32 MiB": [chunk("eXIf", Buffer.alloc(2 ** 25))],
	};
	for (const [name, before] of Object.entries(chunks)) {
		const file = png(2, 2, rows, { before });
		const { thrown, megabytes, seconds } = cost(() => {
			expect(images.inspect(file)).toMatchObject({ width: 2, height: 2, orientation: 1 });
			images.decodeResized(file, [{ width: 2, height: 2 }], "transformers");
		});
		expect([name, thrown, megabytes < 48, seconds < 1]).toEqual([name, null, true, true]);
	}
});

test("Pillow's largest picture is the largest", () => {
	const picture = deflateSync(Buffer.alloc(1));
	expect(images.inspect(png(13377, 13377, picture))).toMatchObject({ width: 13377, height: 13377 });
	expect(() => images.inspect(png(13378, 13378, picture))).toThrow("the image is too large: 13378 x 13378");
	expect(() => images.inspect(png(1_000_001, 1, picture))).toThrow("the image is too large: 1000001 x 1");
	expect(() => images.inspect(png(0, 5, picture))).toThrow("the image has no pixels");
});

/** A progressive JPEG of grey squares of which each scan refines a band of coefficients, all zeros. */
function scanned(side: number, count: number): Uint8Array {
	const segment = (marker: number, data: readonly number[]) => [0xff, marker, 0, data.length + 2, ...data];
	const frame = segment(0xc2, [8, side >> 8, side & 255, side >> 8, side & 255, 1, 1, 0x11, 0]);
	const quantities = segment(0xdb, [0, ...new Array<number>(64).fill(1)]);
	// One code of one bit: a run of 2^14 blocks without a coefficient, its 14 further bits zeros.
	const codes = segment(0xc4, [0x10, 1, ...new Array<number>(15).fill(0), 0xe0]);
	const runs = Math.ceil(Math.ceil(side / 8) ** 2 / 2 ** 14);
	const scan = [...segment(0xda, [1, 1, 0, 1, 63, 0x10]), ...new Array<number>(Math.ceil((runs * 15) / 8)).fill(0)];
	const scans = Array.from({ length: count }, () => scan).flat();
	return Uint8Array.from([0xff, 0xd8, ...frame, ...quantities, ...codes, ...scans, 0xff, 0xd9]);
}

// AddressSanitizer takes a minute for a picture of many pixels.
test.skipIf(sanitized)("a progressive JPEG of more passes than any encoder makes is refused", () => {
	expect(images.decode(scanned(2000, 200), 1).pixels.length).toBe(4_000_000);
	const { thrown, seconds } = cost(() => images.decode(scanned(2000, 4000), 1));
	expect(thrown).toBe("the image takes too long to decode: 2000 x 2000 pixels in 251 scans and more");
	expect(seconds).toBeLessThan(5);
});

test.skipIf(sanitized)("the scans of a large progressive JPEG are bounded by their samples", () => {
	// As many scans as encoders write for full colour, of the largest picture.
	expect(images.decodeResized(scanned(13376, 14), [{ width: 8, height: 8 }], "energon")).toHaveLength(1);
	const { thrown, seconds } = cost(() =>
		images.decodeResized(scanned(13376, 200), [{ width: 8, height: 8 }], "energon"),
	);
	expect(thrown).toBe("the image takes too long to decode: 13376 x 13376 pixels in 25 scans and more");
	expect(seconds).toBeLessThan(20);
});

test("threads that decode at the same time keep to a bound together, or decode one after the other", () => {
	const [file, side] = [join(mkdtempSync(join(tmpdir(), "mimo-images-")), "a.png"), sanitized ? 500 : 3000];
	// RGBA of 16 bits: 8 bytes a pixel inflated, 4 decoded.
	writeFileSync(file, png(side, side, deflateSync(Buffer.alloc((8 * side + 1) * side)), { depth: 16, colours: 6 }));
	const alone = 12 * side ** 2;
	const together = (bound: number) => {
		const command = [process.execPath, join(import.meta.dir, "decode-together.ts"), file, String(bound)];
		const { stdout, stderr } = Bun.spawnSync(command, { stdout: "pipe", stderr: "pipe" });
		expect(stderr.toString()).toBe("");
		return JSON.parse(stdout.toString()) as { bytes: number; digests: string[] };
	};
	const free = together(2 ** 40);
	for (const bound of [1, 1.5 * alone]) {
		const { bytes, digests } = together(bound);
		expect(digests).toEqual(free.digests);
		if (!sanitized) expect(bytes).toBeLessThan(1.5 * alone);
	}
	expect(free.digests).toHaveLength(1);
	// AddressSanitizer keeps freed memory for a while.
	if (!sanitized) expect(free.bytes).toBeGreaterThan(1.6 * alone);
	rmSync(dirname(file), { recursive: true });
});

test("formats that Pillow reads and mimo does not have their own error class, with their name", () => {
	const start = (text: string) => Buffer.concat([Buffer.from(text, "latin1"), Buffer.alloc(64)]);
	for (const [bytes, sentence] of [
		[start("II*\0"), "the image is a TIFF"],
		[start("MM\0*"), "the image is a TIFF"],
		[start("\0\0\0\x0cjP  \r\n\x87\n"), "the image is a JPEG 2000 file"],
		[start("\0\0\0 ftypavif"), "the image is an AVIF"],
		[start("P6\n2 2\n255\n"), "the image is a portable pixmap"],
		[start("\0\0\x01\0"), "the image is a Windows icon"],
	] as const) {
		expect(() => images.inspect(bytes)).toThrow(UnreadImageError);
		expect(() => images.inspect(bytes)).toThrow(sentence);
	}
	expect(() => images.inspect(start("no image"))).not.toThrow(UnreadImageError);
	for (const format of imageFormats) expect(() => images.inspect(start("no image"))).toThrow(format);
});
