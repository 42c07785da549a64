/**
 * An image file to the encoder's patches (docs/spec/vision.md §5.4): inspected, resized and made RGB, cut into tiles,
 * normalised; decoding waits until it is known how large the image will be. docs/decisions/images.md says how the ways to
 * decode differ.
 */
import { deflateSync } from "node:zlib";
import type { PatchGrid } from "../../models/tower.ts";
import type { ImageDecodingName } from "../../native/abi.ts";
import type { ChannelStatistics, Image, ImageHeader, ImageSize, Images } from "../../native/images.ts";
import { type ImagePlan, patchGrids } from "./image-plan.ts";
import { patchesAsTorchvision, resizeAsTorchvision } from "./torchvision.ts";

/** With the size of its pixels as they are stored. */
export interface EncodedImage extends Pick<ImageHeader, "width" | "height" | "orientation" | "grey16"> {
	readonly file: Uint8Array;
}

/** With the size that its decoding gives it. */
export interface DecodableImage extends EncodedImage {
	readonly decoding: ImageDecodingName;
}

/** Reads an image's size; throws a UserError when the file is damaged, an UnreadImageError for a kind that is not read. */
export function inspectImage(images: Images, bytes: Uint8Array): EncodedImage {
	const { width, height, orientation, grey16 } = images.inspect(bytes);
	return { file: bytes, width, height, orientation, grey16 };
}

/** The image as a decoding makes it: transformers' turns it by its EXIF orientation. */
export function decodedAs(image: EncodedImage, decoding: ImageDecodingName): DecodableImage {
	const { width, height, orientation } = image;
	const turned = decoding === "transformers" && orientation >= 5;
	return { ...image, decoding, ...(turned ? { width: height, height: width } : {}) };
}

/** A sentence about an image that `name` names; null: it needs none. */
export function remarkOf({ grey16 }: Pick<EncodedImage, "grey16">, name: string): string | null {
	if (!grey16) return null;
	return `${name} is a PNG with greys of 16 bits: as in Pillow, all above 255 become white. Convert such files to 8 bits.`;
}

export function isImage(value: unknown): value is EncodedImage {
	return typeof value === "object" && value !== null && "file" in value && "width" in value;
}

function cut(image: Image, left: number, top: number, { width, height }: ImageSize): Image {
	const pixels = new Uint8Array(width * height * 3);
	for (let y = 0; y < height; y++) {
		const from = ((top + y) * image.width + left) * 3;
		pixels.set(image.pixels.subarray(from, from + width * 3), y * width * 3);
	}
	return { width, height, channels: 3, pixels };
}

/** The arithmetic of the bicubic filter, and of normalising. */
export type Resampling = "pillow" | "torchvision";

/** The settings that decide the patches of an image. */
export interface PlannedImage extends Pick<DecodableImage, "file" | "decoding"> {
	readonly plan: ImagePlan;
	/** Default: pillow. */
	readonly resampling?: Resampling;
	readonly statistics: ChannelStatistics;
}

/** The patches of every tile of a plan, in order; each [rows · columns of patches, 3p²]. */
export function imagePatches(
	images: Images,
	{ file, decoding, plan, statistics, resampling = "pillow" }: PlannedImage,
	patchSize: number,
): Float32Array[] {
	const { mode, size, columns, rows, thumbnail, inset, picture } = plan;
	const asTorchvision = resampling === "torchvision";
	// transformers' processor of models with dynamic resolution does not round resized values.
	if (decoding === "transformers" && mode === "dynamic" && !asTorchvision) {
		return [images.decodePatches(file, size, patchSize, statistics)];
	}
	const own = inset ?? size;
	const sizes = thumbnail === null ? [own] : [own, thumbnail];
	const square = (image: Image) => (plan.squared ? onSquare(image, statistics) : image);
	const decoded = asTorchvision
		? inAllSizes(square(wholeImage(images, file, decoding)), sizes)
		: images.decodeResized(file, sizes, decoding);
	const [resized, small] = decoded as [Image, Image?];
	const image = inset ? onCanvas(resized, size, inset, [0, 0, 0]) : resized;
	const tile = { width: size.width / columns, height: size.height / rows };
	const tiles: Image[] = [];
	for (let row = 0; row < rows; row++) {
		for (let column = 0; column < columns; column++) {
			tiles.push(rows * columns === 1 ? image : cut(image, column * tile.width, row * tile.height, tile));
		}
	}
	if (small !== undefined && picture) tiles.unshift(small);
	else if (small !== undefined) tiles.push(small);
	const patches = asTorchvision ? patchesAsTorchvision : images.patches.bind(images);
	return tiles.map((part) => patches(part, patchSize, statistics));
}

/** An RGB image at a place of a larger one of one colour. */
function onCanvas(
	image: Image,
	{ width, height }: ImageSize,
	{ left, top }: { readonly left: number; readonly top: number },
	colour: readonly number[],
): Image {
	const pixels = Uint8Array.from({ length: 3 * width * height }, (_, at) => colour[at % 3]!);
	const row = 3 * image.width;
	for (let y = 0; y < image.height; y++) {
		pixels.set(image.pixels.subarray(y * row, (y + 1) * row), 3 * ((top + y) * width + left));
	}
	return { width, height, channels: 3, pixels };
}

/** An image in the middle of a square of the mean colour. */
function onSquare(image: Image, { mean }: ChannelStatistics): Image {
	const side = Math.max(image.width, image.height);
	const place = { left: Math.floor((side - image.width) / 2), top: Math.floor((side - image.height) / 2) };
	return onCanvas(
		image,
		{ width: side, height: side },
		place,
		mean.map((average) => Math.trunc(average * 255)),
	);
}

const inAllSizes = (image: Image, sizes: readonly ImageSize[]) => sizes.map((size) => resizeAsTorchvision(image, size));

/** In its own size. */
function wholeImage(images: Images, file: Uint8Array, decoding: ImageDecodingName): Image {
	const { width, height } = decodedAs(inspectImage(images, file), decoding);
	return images.decodeResized(file, [{ width, height }], decoding)[0]!;
}

/** The pictures that the encoder gets of an image, before they are normalised, as RGB of 8 bits: its tiles, then the thumbnail. */
export function seenPictures(images: Images, image: PlannedImage, patchSize: number): Image[] {
	const grids = patchGrids(image.plan, patchSize);
	return imagePatches(images, image, patchSize).map((patches, tile) =>
		pictureOf(patches, grids[tile]!, patchSize, image.statistics),
	);
}

/** The picture of a grid's patches, [rows · columns, 3p²], before it is normalised, as RGB of 8 bits. */
export function pictureOf(
	patches: Float32Array,
	{ rows, columns }: PatchGrid,
	patchSize: number,
	{ mean, deviation }: ChannelStatistics,
): Image {
	const [width, height] = [columns * patchSize, rows * patchSize];
	const pixels = new Uint8ClampedArray(3 * width * height);
	for (const [i, value] of patches.entries()) {
		const [x, y] = [i % patchSize, Math.floor(i / patchSize) % patchSize];
		const channel = Math.floor(i / patchSize ** 2) % 3;
		const patch = Math.floor(i / (3 * patchSize ** 2));
		const row = Math.floor(patch / columns) * patchSize + y;
		const column = (patch % columns) * patchSize + x;
		pixels[3 * (row * width + column) + channel] = 255 * (value * deviation[channel]! + mean[channel]!);
	}
	return { width, height, channels: 3, pixels: new Uint8Array(pixels.buffer) };
}

/** An RGB picture of at most `side` pixels a side: means over squares of pixels. */
export function thumbnailOf({ width, height, pixels }: Image, side: number): Image & { readonly channels: 3 } {
	const step = Math.max(1, Math.ceil(Math.max(width, height) / side));
	const [columns, rows] = [Math.ceil(width / step), Math.ceil(height / step)];
	const means = Uint8Array.from({ length: 3 * columns * rows }, (_, i) => {
		const [left, top] = [step * (Math.floor(i / 3) % columns), step * Math.floor(i / 3 / columns)];
		let [sum, count] = [0, 0];
		for (let y = top; y < Math.min(top + step, height); y++) {
			for (let x = left; x < Math.min(left + step, width); x++, count++) sum += pixels[3 * (y * width + x) + (i % 3)]!;
		}
		return Math.round(sum / count);
	});
	return { width: columns, height: rows, channels: 3, pixels: means };
}

// PNG files of grey or RGB pixels.

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
