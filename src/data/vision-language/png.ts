/** PNG files of grey or RGB pixels. */
import { deflateSync } from "node:zlib";
import type { Image } from "../../native/images.ts";

/** An image of 1 or 3 channels as a PNG file of 8 bits, with unfiltered rows. */
export function encodePng({ width, height, channels, pixels }: Image & { readonly channels: 1 | 3 }): Buffer {
	const header = Buffer.alloc(13);
	header.writeUInt32BE(width, 0);
	header.writeUInt32BE(height, 4);
	header[8] = 8;
	header[9] = channels === 1 ? 0 : 2;
	const row = width * channels;
	const rows = Buffer.alloc(height * (1 + row));
	for (let y = 0; y < height; y++) rows.set(pixels.subarray(y * row, (y + 1) * row), y * (1 + row) + 1);
	return Buffer.concat([
		Buffer.from("\x89PNG\r\n\x1a\n", "latin1"),
		...[chunk("IHDR", header), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))],
	]);
}

function chunk(name: string, data: Uint8Array): Buffer {
	const body = Buffer.concat([Buffer.from(name, "latin1"), data]);
	const numbers = Buffer.alloc(8);
	numbers.writeUInt32BE(data.length, 0);
	numbers.writeUInt32BE(Bun.hash.crc32(body), 4);
	return Buffer.concat([numbers.subarray(0, 4), body, numbers.subarray(4)]);
}
