/**
 * Pictures of odd sizes as transformers' processors of SigLIP, InternVL, Qwen-VL, GLM-V and LLaVA-OneVision make them: sizes, tiles and every
 * value. With MIMO_TEST_FULL=1, where there is a reference Python, three hundred odd files too, and Nemotron's processor.
 */
import { beforeAll, expect, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { blockSize } from "../../../src/data/vision-language/image-plan.ts";
import { encodePng } from "../../../src/data/vision-language/pixels.ts";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { referencePython, runPython } from "../../reference/python.ts";
import { sanitized } from "../../sanitizer.ts";
import { type Processed, patchesOfNemotron, processed } from "./processed.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

interface Sized {
	readonly height: number;
	readonly width: number;
}
const { cases } = JSON.parse(readFileSync(join(import.meta.dir, "../../golden/processors.json"), "utf8")) as {
	cases: readonly (Sized & Processed)[];
};

/** Bytes of a picture: tests/golden/tools/make_processors.py. */
function picture(number: number, { height, width }: Sized): Uint8Array {
	return Uint8Array.from({ length: height * width * 3 }, (_, n) => {
		let h = (Math.imul(n, 0x9e3779b1) + Math.imul(number, 0x85ebca77)) >>> 0;
		h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
		h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
		return ((h ^ (h >>> 16)) >>> 24) & 0xff;
	});
}

test.each(cases.map((one, number) => [`${one.width} x ${one.height}`, number, one] as const))(
	"%s",
	(_, number, { width, height, ...expected }) => {
		const file = encodePng({ width, height, channels: 3, pixels: picture(number, { width, height }) });
		expect(processed(images, file, { long: expected.blocks === undefined })).toEqual(expected);
	},
);

test("an edge that is more than 200 times the other is refused", () => {
	expect(() => blockSize({ width: 201, height: 1 }, 8, { minPixels: 256, maxPixels: 6144, minSide: 0 })).toThrow(
		"An image of 201 x 1 pixels is more than 200 times as long as wide.",
	);
});

interface Odd extends Sized, Processed {
	readonly name: string;
	readonly file: string;
	/** Values in base64; absent: transformers divides by zero. */
	readonly omni?: readonly [rows: number, columns: number, values: string];
}

const bytesOf = (base64: string) => new Uint8Array(Buffer.from(base64, "base64"));

// Values are those of PyTorch bit for bit where it was compiled for four products at a time; others add in another order.
const rounding = 1e-6;
/** Rows of the text that an image may have. */
const room = 64;

const full = process.env.MIMO_TEST_FULL === "1" && !sanitized;
const python = full ? referencePython("PIL", "torch", "torchvision", "transformers") : null;
test.skipIf(python === null)(
	"three hundred odd files, from one pixel to very wide, of every kind",
	async () => {
		const folder = mkdtempSync(join(tmpdir(), "mimo-processors-"));
		try {
			const out = join(folder, "made.json");
			await runPython(python!, [join(import.meta.dir, "../../reference/picture_processors.py"), "5", out]);
			const odd = JSON.parse(readFileSync(out, "utf8")) as Odd[];
			expect(odd.length).toBeGreaterThan(300);
			let worst = 0;
			const differing = odd.filter(({ name, file: base64, width, height, omni, ...expected }) => {
				const file = bytesOf(base64);
				const own = processed(images, file, { long: expected.blocks === undefined });
				if (!Bun.deepEquals(own, expected)) return true;
				if (omni === undefined) return false;
				const [rows, columns, values] = omni;
				// Of a very narrow picture transformers makes more than it has room for.
				if (rows * columns > 4 * room) return false;
				const whole = patchesOfNemotron(images, file, room);
				const theirs = new Float32Array(bytesOf(values).buffer);
				const difference = whole.values.reduce((most, v, i) => Math.max(most, Math.abs(v - theirs[i]!)), 0);
				worst = Math.max(worst, difference);
				return (
					!Bun.deepEquals(whole.grid, { rows, columns }) ||
					theirs.length !== whole.values.length ||
					!(difference < rounding)
				);
			});
			console.log(`${odd.length} files, largest difference of Nemotron's values ${worst}`);
			expect(differing.map(({ name }) => name)).toEqual([]);
		} finally {
			rmSync(folder, { recursive: true });
		}
	},
	240_000,
);
