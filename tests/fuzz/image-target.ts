/** Image files of a kind as inputs: small ones from Pillow's reference. */
import { join } from "node:path";
import { clipStatistics, type ImageFormat, Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { UserError } from "../../src/system/errors.ts";
import type { FuzzParser } from "./parser.ts";

interface PillowFile {
	readonly name: string;
	readonly file: string;
	readonly refused?: true;
}

/** A damaged size may be large and the file whole: its decoding has no limit of time. */
const largestArea = 1 << 22;

/** Corrects the checksums of a PNG's parts, so that the decoder behind them is reached. */
function repairPng(bytes: Uint8Array): Uint8Array {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
	for (let at = 8; at + 12 <= bytes.length; ) {
		const end = at + 8 + view.getUint32(at);
		if (end + 4 > bytes.length) break;
		view.setUint32(end, Bun.hash.crc32(bytes.subarray(at + 4, end)));
		at = end + 4;
	}
	return bytes;
}

export function imageParser(format: ImageFormat): FuzzParser {
	return {
		about: `${format} files: header, pixels, and resized`,
		open: async () => {
			const images = new Images(await openLibrary("cpu"));
			const golden = join(import.meta.dir, "../golden/images");
			const lists = ["pillow.json", "transformers.json"].map(async (name): Promise<readonly PillowFile[]> => {
				return (await Bun.file(join(golden, name)).json()).files;
			});
			const files = (await Promise.all(lists)).flat();
			const whole = files.filter(({ name, refused }) => name.startsWith(format) && !refused);
			return {
				seeds: whole.map(({ file }) => new Uint8Array(Buffer.from(file, "base64"))),
				...(format === "PNG" ? { repair: repairPng } : {}),
				parse: (bytes) => {
					const { width, height } = images.inspect(bytes);
					if (width * height > largestArea) return;
					for (const channels of [1, 3, 4] as const) images.decode(bytes, channels);
					const sizes = [
						{ width: 7, height: 5 },
						{ width: 31, height: 3 },
					];
					for (const decoding of ["energon", "transformers"] as const) images.decodeResized(bytes, sizes, decoding);
					images.decodePatches(bytes, { width: 8, height: 4 }, 4, clipStatistics);
				},
				refuses: (error) => error instanceof UserError && /^the image [ -~]{5,200}$/.test(error.message),
			};
		},
	};
}
