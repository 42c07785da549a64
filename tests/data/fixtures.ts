/** Small data sets that tests make for themselves. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { joinImages } from "../../src/data/images.ts";
import type { ImageTextBatch } from "../../src/data/vision-language/batch.ts";
import { encodePng } from "../../src/data/vision-language/pixels.ts";

/** The batch of a rank that reads several lanes: images of all, lane after lane, and text of the first. */
export function joinLanes(lanes: ReadonlyMap<number, ImageTextBatch>): ImageTextBatch {
	const batches = [...lanes.values()];
	return {
		...batches[0]!,
		names: batches.flatMap(({ names }) => names),
		imageCount: batches.reduce((sum, { imageCount }) => sum + imageCount, 0),
		images: joinImages(batches.map(({ images }) => images)),
	};
}

/** A folder that is gone with the test. */
export class Scratch implements Disposable {
	readonly path = mkdtempSync(join(tmpdir(), "mimo-data-"));

	file(name: string, content: string | Uint8Array): string {
		const path = join(this.path, name);
		mkdirSync(dirname(path), { recursive: true });
		writeFileSync(path, content);
		return path;
	}

	[Symbol.dispose](): void {
		rmSync(this.path, { recursive: true, force: true });
	}
}

/** Header block of a member. */
export function tarHeader(name: string, size: number, type = "0"): Buffer {
	const header = Buffer.alloc(512);
	header.write(name, 0, 100);
	header.write("0000644\0", 100);
	header.write(`${size.toString(8).padStart(11, "0")}\0`, 124);
	header.write("        ", 148);
	header.write(type, 156);
	header.write("ustar\0" + "00", 257);
	const sum = header.reduce((total, byte) => total + byte, 0);
	header.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
	return header;
}

function padded(content: Uint8Array): Buffer {
	return Buffer.concat([content, Buffer.alloc((512 - (content.length % 512)) % 512)]);
}

export type Member = readonly [name: string, content: string | Uint8Array];

/** A tar file; names of more than 100 bytes get a GNU long-name header. */
export function tar(members: readonly Member[]): Buffer {
	const blocks = members.flatMap(([name, content]) => {
		const bytes = Buffer.from(content);
		const long = Buffer.byteLength(name) > 100 ? Buffer.from(`${name}\0`) : null;
		const extension = long === null ? [] : [tarHeader("././@LongLink", long.length, "L"), padded(long)];
		return [...extension, tarHeader(name, bytes.length), padded(bytes)];
	});
	return Buffer.concat([...blocks, Buffer.alloc(1024)]);
}

/** A small RGB image as a PNG file. */
export function png(width: number, height: number, seed = 0): Buffer {
	const row = 1 + width * 3;
	const pixels = new Uint8Array(height * width * 3);
	for (let y = 0, at = 0; y < height; y++) {
		for (let x = 1; x < row; x++) pixels[at++] = ((y * row + x) * 31 + seed * 17) % 256;
	}
	return encodePng({ width, height, channels: 3, pixels });
}

/** A PNG file with an EXIF orientation. */
export function withOrientation(file: Uint8Array, orientation: number): Buffer {
	const directory = [
		0x4d,
		0x4d,
		0,
		0x2a,
		0,
		0,
		0,
		8,
		0,
		1,
		0x01,
		0x12,
		0,
		3,
		0,
		0,
		0,
		1,
		0,
		orientation,
		0,
		0,
		0,
		0,
		0,
		0,
	];
	const body = Buffer.concat([Buffer.from("eXIf", "latin1"), Uint8Array.from(directory)]);
	const numbers = Buffer.alloc(8);
	numbers.writeUInt32BE(directory.length, 0);
	numbers.writeUInt32BE(Bun.hash.crc32(body), 4);
	const header = 33;
	return Buffer.concat([
		...[file.subarray(0, header), numbers.subarray(0, 4), body, numbers.subarray(4), file.subarray(header)],
	]);
}

/** Text of sample `i`: lengths vary. */
export function caption(i: number): string {
	return `caption ${i} ${"word ".repeat((i * 7) % 11)}`.trim();
}

/** A prepared captioning data set: shards of `counts` samples, keys counting on from "000000". */
export function captions(folder: Scratch, name: string, counts: readonly number[], split = "1,0,0"): string {
	let key = 0;
	for (const [shard, count] of counts.entries()) {
		const members: Member[] = [];
		for (let i = 0; i < count; i++, key++) {
			const base = `${name}${String(key).padStart(6, "0")}`;
			members.push([`${base}.png`, png(3 + (key % 4), 2 + (key % 3), key)], [`${base}.txt`, caption(key)]);
		}
		folder.file(`${name}/${name}-${String(shard).padStart(3, "0")}.tar`, tar(members));
	}
	const path = join(folder.path, name);
	prepare(path, {
		...defaultPrepareOptions,
		splitRatio: split,
		sampleType: "CaptioningSample",
		fieldMap: '{"image": "png", "caption": "txt"}',
	});
	return path;
}
