/** Decodes the parts of a sample by their extension, as Energon's default decoder does (spec energon.md §1.6). */
import { imageFormats, UnreadImageError } from "../../../native/images.ts";
import { DecodingError, FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";

/** An image in memory: rows from the top, channels interleaved, 8 bits each. */
export interface DecodedImage {
	readonly width: number;
	readonly height: number;
	/** 1 = grey, 3 = RGB, 4 = RGBA. */
	readonly channels: 1 | 3 | 4;
	readonly pixels: Uint8Array;
}

/** Reads an image file; throws when it is damaged or of an unknown kind. */
export type ImageDecoder = (bytes: Uint8Array) => unknown;

/** Null: every part stays bytes. */
export type DecodeOptions = {
	/** Decoder of images; null leaves their bytes as they are. */
	readonly images: ImageDecoder | null;
} | null;

const imageExtensions = new Set(
	(
		"blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx " +
		"j2c icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb " +
		"vda vst webp wmf emf xbm xpm"
	).split(" "),
);

export function isImageExtension(extension: string): boolean {
	return imageExtensions.has(lastOf(extension).toLowerCase());
}

function lastOf(extension: string): string {
	return extension.slice(extension.lastIndexOf(".") + 1);
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

type Decode = (bytes: Uint8Array) => unknown;

const text: Decode = (bytes) => utf8.decode(bytes);
const integer: Decode = (bytes) => {
	const digits = utf8.decode(bytes).trim();
	if (!/^[+-]?\d+(?:_\d+)*$/.test(digits)) throw new Error(`"${digits.slice(0, 40)}" is not an integer`);
	return Number(digits.replaceAll("_", ""));
};
const json: Decode = (bytes) => JSON.parse(utf8.decode(bytes));

const decoders = new Map<string, Decode>([
	...["txt", "text", "transcript"].map((name): [string, Decode] => [name, text]),
	...["cls", "cls2", "index", "inx", "id"].map((name): [string, Decode] => [name, integer]),
	...["json", "jsn"].map((name): [string, Decode] => [name, json]),
]);

/** One part. Extensions without a decoder stay bytes; `.gz` is inflated first. */
export function decodePart(extension: string, bytes: Uint8Array, options: DecodeOptions): unknown {
	if (options === null) return bytes;
	if (lastOf(extension) === "gz") {
		const inner = extension.slice(0, -3);
		return decodePart(inner, Bun.gunzipSync(new Uint8Array(bytes)), options);
	}
	const decode = decoders.get(lastOf(extension));
	if (decode) return decode(bytes);
	return options.images !== null && isImageExtension(extension) ? options.images(bytes) : bytes;
}

/** All parts of a raw sample. Throws a DecodingError naming key and part. */
export function decodeParts(sample: RawSample, options: DecodeOptions): Record<string, unknown> {
	const decoded: Record<string, unknown> = {};
	for (const [extension, bytes] of sample.parts) {
		try {
			decoded[extension] = decodePart(extension, bytes, options);
		} catch (error) {
			// The Python package delivers such a sample: without it the order of all that follow would be another.
			if (error instanceof UnreadImageError) {
				const kinds = `${imageFormats.slice(0, -1).join(", ")} and ${imageFormats.at(-1)}`;
				throw new FatalSampleError(
					`Sample ${sample.shard}/${sample.key}: the part ${extension} cannot be read: ${error.message}; mimo reads ${kinds}.`,
					{ cause: error },
				);
			}
			const why = error instanceof Error ? error.message : String(error);
			throw new DecodingError(
				`Sample ${sample.shard}/${sample.key}: the part ${extension} cannot be decoded: ${why}.`,
				sample.key,
				extension,
				{ cause: error },
			);
		}
	}
	return decoded;
}
