/**
 * An image file to the encoder's patches (docs/spec/vision.md §5.4): resized and made RGB, cut into tiles, normalised.
 */
import type { ChannelStatistics, Image, ImageSize, Images } from "../../native/images.ts";
import type { ImagePlan } from "./image-plan.ts";

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
	const [image, small] = images.decodeResized(file, thumbnail === null ? [size] : [size, thumbnail]) as [Image, Image?];
	const tile = { width: size.width / columns, height: size.height / rows };
	const tiles: Image[] = [];
	for (let row = 0; row < rows; row++) {
		for (let column = 0; column < columns; column++) {
			tiles.push(rows * columns === 1 ? image : cut(image, column * tile.width, row * tile.height, tile));
		}
	}
	if (small !== undefined) tiles.push(small);
	return tiles.map((part) => images.patches(part, patchSize, statistics));
}
