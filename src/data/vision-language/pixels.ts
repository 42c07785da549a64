/**
 * An image file to the encoder's patches (spec vision 5.4): resized as Pillow resizes an image of its kind — nearest
 * with a palette, alpha premultiplied — and only then made RGB, cut into tiles, normalised.
 */
import type { ChannelStatistics, Image, ImageSize, Images } from "../../native/images.ts";
import type { ImagePlan } from "./image-plan.ts";

/** How Pillow holds the pixels: with a palette or one bit, with alpha, or neither. */
type Kind = "nearest" | "alpha" | "plain";

const pngSignature = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];

function kindOf(file: Uint8Array): Kind {
	if (file.length < 26 || pngSignature.some((byte, i) => file[i] !== byte)) return "plain";
	const [bits, colors] = [file[24]!, file[25]!];
	if (colors === 3 || (colors === 0 && bits === 1)) return "nearest";
	return colors === 4 || colors === 6 ? "alpha" : "plain";
}

/** Decodes a file and resizes it to RGB of `size`. Throws a UserError when it is damaged. */
export function resizedImage(images: Images, file: Uint8Array, size: ImageSize): Image {
	const kind = kindOf(file);
	if (kind === "alpha") {
		const image = images.decode(file, 4);
		const same = image.width === size.width && image.height === size.height;
		return withoutAlpha(same ? image : images.resize(image, size));
	}
	const image = images.decode(file, 3);
	if (image.width === size.width && image.height === size.height) return image;
	return kind === "nearest" ? nearest(image, size) : images.resize(image, size);
}

function withoutAlpha({ width, height, pixels }: Image): Image {
	const rgb = new Uint8Array(width * height * 3);
	for (let from = 0, to = 0; to < rgb.length; from += 4, to += 3) {
		rgb[to] = pixels[from]!;
		rgb[to + 1] = pixels[from + 1]!;
		rgb[to + 2] = pixels[from + 2]!;
	}
	return { width, height, channels: 3, pixels: rgb };
}

/** Source places by adding up the scale, as Pillow does: the sum rounds differently from a product. */
function nearestPlaces(from: number, to: number): Int32Array {
	const places = new Int32Array(to);
	const scale = from / to;
	let at = scale * 0.5;
	for (let i = 0; i < to; i++) {
		places[i] = Math.min(from - 1, Math.floor(at));
		at += scale;
	}
	return places;
}

function nearest(image: Image, { width, height }: ImageSize): Image {
	const pixels = new Uint8Array(width * height * 3);
	const columns = nearestPlaces(image.width, width);
	let to = 0;
	for (const row of nearestPlaces(image.height, height)) {
		for (const column of columns) {
			const from = (row * image.width + column) * 3;
			pixels[to++] = image.pixels[from]!;
			pixels[to++] = image.pixels[from + 1]!;
			pixels[to++] = image.pixels[from + 2]!;
		}
	}
	return { width, height, channels: 3, pixels };
}

function cut(image: Image, left: number, top: number, { width, height }: ImageSize): Image {
	const pixels = new Uint8Array(width * height * 3);
	for (let y = 0; y < height; y++) {
		const from = ((top + y) * image.width + left) * 3;
		pixels.set(image.pixels.subarray(from, from + width * 3), y * width * 3);
	}
	return { width, height, channels: 3, pixels };
}

/** The patches of every tile of a plan, in order; each [rows · columns of patches, 3p²]. */
export function imagePatches(
	images: Images,
	file: Uint8Array,
	{ size, columns, rows, thumbnail }: ImagePlan,
	patchSize: number,
	statistics: ChannelStatistics,
): Float32Array[] {
	const image = resizedImage(images, file, size);
	const tile = { width: size.width / columns, height: size.height / rows };
	const tiles: Image[] = [];
	for (let row = 0; row < rows; row++) {
		for (let column = 0; column < columns; column++) {
			tiles.push(rows * columns === 1 ? image : cut(image, column * tile.width, row * tile.height, tile));
		}
	}
	if (thumbnail !== null) tiles.push(resizedImage(images, file, thumbnail));
	return tiles.map((part) => images.patches(part, patchSize, statistics));
}
