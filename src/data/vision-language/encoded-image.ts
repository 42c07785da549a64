/** An image as its file, with its size. Decoding waits until it is known how large it will be. */
import type { Images } from "../../native/images.ts";

export interface EncodedImage {
	readonly file: Uint8Array;
	readonly width: number;
	readonly height: number;
}

/** Reads an image's size; throws a UserError when the file is damaged, an UnreadImageError for a kind that is not read. */
export function inspectImage(images: Images, bytes: Uint8Array): EncodedImage {
	const { width, height } = images.inspect(bytes);
	return { file: bytes, width, height };
}

export function isImage(value: unknown): value is EncodedImage {
	return typeof value === "object" && value !== null && "file" in value && "width" in value;
}
