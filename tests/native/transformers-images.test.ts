/**
 * Image files of odd kinds as datasets and transformers decode them: turned by EXIF and XMP, on white, palettes as colours. The
 * recorded files are those of transformers_images.py; where there is a reference Python, it makes others of the same kinds.
 */
import { beforeAll, describe, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { CryptoHasher } from "bun";
import { decodedAs, inspectImage } from "../../src/data/vision-language/pixels.ts";
import { clipStatistics, Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { referencePython, runPython } from "../reference/python.ts";
import { sanitized } from "../sanitizer.ts";

interface Shown {
	readonly name: string;
	readonly file: string;
	readonly stored: readonly [number, number];
	readonly size: readonly [number, number];
	/** Digests of the pixels, and of those resized to a width and height. */
	readonly rgb: string;
	readonly resized: readonly [number, number, string];
}

interface Processed {
	readonly name: string;
	readonly file: string;
	readonly grid: readonly [rows: number, columns: number];
	/** Base64 of the processor's fp32 values. */
	readonly values: string;
}

interface Expected {
	readonly files: readonly Shown[];
	readonly patches: readonly Processed[];
}

const recorded: Expected = await Bun.file(join(import.meta.dir, "../golden/images/transformers.json")).json();
const bytesOf = (base64: string) => new Uint8Array(Buffer.from(base64, "base64"));
const digest = (pixels: Uint8Array) => new CryptoHasher("sha256").update(pixels).digest("hex").slice(0, 24);

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

/** Names of the files that are decoded otherwise. */
function differing({ files }: Expected): string[] {
	return files.flatMap(({ name, file, stored, size, rgb, resized }) => {
		const [width, height, smaller] = resized;
		const image = decodedAs(inspectImage(images, bytesOf(file)), "transformers");
		const sizes = [image, { width, height }];
		const [whole, other] = images
			.decodeResized(bytesOf(file), sizes, "transformers")
			.map(({ pixels }) => digest(pixels));
		const header = images.inspect(bytesOf(file));
		const found = [header.width, header.height, image.width, image.height, whole, other];
		const expected = [...stored, ...size, rgb, smaller];
		return Bun.deepEquals(found, expected) ? [] : [`${name}: ${found} instead of ${expected}`];
	});
}

function expectPatches({ patches }: Expected): void {
	for (const { name, file, grid, values } of patches) {
		const expected = new Float32Array(bytesOf(values).buffer);
		const size = { width: 4 * grid[1], height: 4 * grid[0] };
		const found = images.decodePatches(bytesOf(file), size, 4, clipStatistics);
		const worst = Math.max(...found.map((value, i) => Math.abs(value - expected[i]!)));
		expect({ name, length: found.length, near: worst < 2e-5 }).toEqual({ name, length: expected.length, near: true });
	}
	// White is at most 2.15: bicubic weights overshoot, and nothing is clamped.
	expect(Math.max(...patches.flatMap(({ values }) => [...new Float32Array(bytesOf(values).buffer)]))).toBeGreaterThan(
		2.2,
	);
}

describe("recorded files", () => {
	test("are shown as datasets and convert_to_rgb show them", () => {
		expect(recorded.files.length).toBeGreaterThan(200);
		expect(differing(recorded)).toEqual([]);
	});

	test("have the patches of transformers' processor, to rounding", () => {
		expect(recorded.patches.length).toBe(4);
		expectPatches(recorded);
	});
});

// Under the sanitizers the recorded files take the same paths.
const python = sanitized ? null : referencePython("PIL");
test.skipIf(python === null)(
	"files that Pillow makes now",
	async () => {
		const folder = mkdtempSync(join(tmpdir(), "mimo-images-"));
		try {
			const output = join(folder, "images.json");
			await runPython(python!, [join(import.meta.dir, "transformers_images.py"), output, "2"]);
			const made = JSON.parse(readFileSync(output, "utf8")) as Expected;
			expect(made.files.map(({ name }) => name.replaceAll(/\d+/g, ""))).toEqual(
				recorded.files.map(({ name }) => name.replaceAll(/\d+/g, "")),
			);
			expect(differing(made)).toEqual([]);
			expectPatches(made);
		} finally {
			rmSync(folder, { recursive: true });
		}
	},
	120_000,
);

test("Energon's decoding leaves pictures as they are stored", () => {
	const turned = recorded.files.find(({ name }) => name === "JPEG orientation 6 <")!;
	const file = bytesOf(turned.file);
	const image = decodedAs(inspectImage(images, file), "energon");
	expect([image.width, image.height]).toEqual([...turned.stored]);
	const [pixels] = images.decodeResized(file, [image], "energon");
	expect(digest(pixels!.pixels)).toBe(digest(images.decode(file).pixels));
	expect(digest(pixels!.pixels)).not.toBe(turned.rgb);
});
