/** Decodes the parts of a sample by their extension, as Energon's default decoder does (docs/spec/energon.md §1.6). */
import { gunzipSync } from "node:zlib";
import { imageFormats, UnreadImageError } from "../../../native/images.ts";
import { DecodingError, FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { parseJsonBytes } from "./python-text.ts";

/** Decodes an image file; throws where it is damaged or of an unknown format. */
export type ImageDecoder = (bytes: Uint8Array) => unknown;

/** What to decode; null: every part stays bytes. */
export type DecodeOptions = {
	/** Decoder of images; null: images stay bytes. */
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

const videoExtensions = new Set("mp4 m4v mov avi mkv webm ogv ogg wmv flv mpg mpeg 3gp y4m".split(" "));
const audioExtensions = new Set("mp3 wav flac m4a aac opus oga wma aiff aif".split(" "));

/** The medium of an extension of video or audio files; null for other extensions. */
export function mediaOfExtension(extension: string): "video" | "audio" | null {
	const last = lastOf(extension).toLowerCase();
	if (videoExtensions.has(last)) return "video";
	return audioExtensions.has(last) ? "audio" : null;
}

function lastOf(extension: string): string {
	return extension.slice(extension.lastIndexOf(".") + 1);
}

/** Bytes of the largest text or JSON part, and of a part that `.gz` inflates to. */
export const LARGEST_TEXT_PART = 2 ** 26;
const LARGEST_INFLATED = 2 ** 28;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

type Decode = (bytes: Uint8Array) => unknown;

/** Bounds the size of a part that becomes objects or strings, which take many times its bytes. */
function bounded(decode: Decode): Decode {
	return (bytes) => {
		if (bytes.length > LARGEST_TEXT_PART) {
			throw new Error(`it has ${bytes.length} bytes; a text or JSON part has at most ${LARGEST_TEXT_PART}`);
		}
		return decode(bytes);
	};
}

const text: Decode = (bytes) => utf8.decode(bytes);
const integer: Decode = (bytes) => {
	const digits = utf8.decode(bytes).trim();
	if (!/^[+-]?\d+(?:_\d+)*$/.test(digits)) throw new Error(`"${digits.slice(0, 40)}" is not an integer`);
	const value = Number(digits.replaceAll("_", ""));
	return Number.isSafeInteger(value) ? value : BigInt(digits.replaceAll("_", "").replace(/^\+/, ""));
};

const decoders = new Map<string, Decode>([
	...["txt", "text", "transcript"].map((name): [string, Decode] => [name, text]),
	...["cls", "cls2", "index", "inx", "id"].map((name): [string, Decode] => [name, integer]),
	...["json", "jsn"].map((name): [string, Decode] => [name, parseJsonBytes]),
]);

function inflate(bytes: Uint8Array): Uint8Array {
	try {
		return gunzipSync(bytes, { maxOutputLength: LARGEST_INFLATED });
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code !== "ERR_BUFFER_TOO_LARGE") throw error;
		throw new Error(`it inflates to more than ${LARGEST_INFLATED} bytes`);
	}
}

/** Decodes a part. Parts whose extension has no decoder stay bytes; `.gz` is inflated first. */
export function decodePart(extension: string, bytes: Uint8Array, options: DecodeOptions): unknown {
	if (options === null) return bytes;
	if (lastOf(extension) === "gz") {
		const inner = extension.slice(0, -3);
		return decodePart(inner, inflate(bytes), options);
	}
	const decode = decoders.get(lastOf(extension));
	if (decode) return bounded(decode)(bytes);
	return options.images !== null && isImageExtension(extension) ? options.images(bytes) : bytes;
}

/** Decodes all parts of a raw sample. Throws a DecodingError that names key and part. */
export function decodeParts(sample: RawSample, options: DecodeOptions): Record<string, unknown> {
	const decoded: Record<string, unknown> = {};
	for (const [extension, bytes] of sample.parts) {
		try {
			decoded[extension] = decodePart(extension, bytes, options);
		} catch (error) {
			// The Python package delivers such a sample; skipping it would change the order of all later samples.
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
