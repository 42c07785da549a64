/** An image as its file, with its size. Decoding waits until it is known how large it will be. */
import type { ImageDecodingName } from "../../native/abi.ts";
import type { ImageHeader, Images } from "../../native/images.ts";

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

/** What has to be said of an image that `name` names, as a sentence; null: nothing. */
export function remarkOf({ grey16 }: Pick<EncodedImage, "grey16">, name: string): string | null {
	if (!grey16) return null;
	return `${name} is a PNG with greys of 16 bits: as in Pillow, all above 255 become white. Convert such files to 8 bits.`;
}

export function isImage(value: unknown): value is EncodedImage {
	return typeof value === "object" && value !== null && "file" in value && "width" in value;
}
