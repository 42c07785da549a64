/**
 * Media that a sample names or contains: images among its own parts or in auxiliary data, and those that cannot be trained on, so that they
 * are named rather than ignored.
 */

import { gunzipSync } from "node:zlib";
import { imageFormats, UnreadImageError } from "../../../native/images.ts";
import { counted } from "../../../system/counted.ts";
import { importLine } from "../../import/detect.ts";
import { DecodingError, FatalSampleError, SampleError } from "../errors.ts";
import type { RawSample, Sample } from "../sample.ts";
import type { FileStore } from "./file-store.ts";
import { parseJsonBytes } from "./python-text.ts";

/** JSON fields that name files beside the record. */
const fields: Readonly<Record<"image" | "video" | "audio", readonly string[]>> = {
	image: ["image", "images", "image_path", "image_paths", "image_url"],
	video: ["video", "videos", "video_path"],
	audio: ["audio", "audios", "audio_path", "sound"],
};
const tags = { image: "<image>", video: "<video>", audio: "<audio>" } as const;

/** Files that a field names: their first one, or null. */
function firstNamed(value: unknown): string | null {
	if (typeof value === "string") return value === "" ? null : value;
	if (Array.isArray(value)) return value.map(firstNamed).find((name) => name !== null) ?? null;
	if (typeof value !== "object" || value === null) return null;
	const { url, path, src } = value as Record<string, unknown>;
	return firstNamed(url ?? path ?? src ?? null);
}

/** Why a JSON record names media of a kind, or null. */
function namedMedia(record: Readonly<Record<string, unknown>>, kind: keyof typeof fields): string | null {
	for (const field of fields[kind]) {
		const name = Object.hasOwn(record, field) ? firstNamed(record[field]) : null;
		if (name !== null) return `its field ${field} names ${JSON.stringify(name.slice(0, 100))}`;
	}
	return null;
}

/** Why the text of a record asks for media of a kind, or null. */
function taggedMedia(record: Readonly<Record<string, unknown>>, kind: keyof typeof tags): string | null {
	const inText = (value: unknown): boolean => {
		if (typeof value === "string") return value.includes(tags[kind]);
		if (Array.isArray(value)) return value.some(inText);
		if (typeof value !== "object" || value === null) return false;
		const { type, value: said, content, text } = value as Record<string, unknown>;
		return type === kind || type === `${kind}_url` || [said, content, text].some(inText);
	};
	const { conversations, messages, text, caption } = record;
	return [conversations, messages, text, caption].some(inText) ? `its text has ${tags[kind]}` : null;
}

/** How images get into samples: for messages about records that only name them. */
export const imagesInTars = "images are read from tar files, beside the JSON part of their sample";

/** Field of a crude sample with the images that its record names, in the order of the record: from auxiliary data. */
export const NAMED_IMAGES = "__images__";

/** The images that a record names, in order: the entries of a document, a field, or those in its turns. */
export function imageNamesOf(record: Readonly<Record<string, unknown>>): readonly unknown[] {
	const document = interleavedRecord(record);
	if (document !== null) return typeof document === "string" ? [] : document.names;
	for (const field of fields.image) {
		const value = Object.hasOwn(record, field) ? record[field] : null;
		if (firstNamed(value) === null) continue;
		return (Array.isArray(value) ? value : [value]).map((item: unknown) => firstNamed(item) ?? item);
	}
	const turns = record.messages ?? record.conversations;
	if (!Array.isArray(turns)) return [];
	return turns.flatMap((turn: unknown) => {
		const content = (turn as { content?: unknown } | null)?.content;
		return Array.isArray(content) ? content.flatMap(namesInPart) : [];
	});
}

function namesInPart(part: unknown): string[] {
	const { type, image_url: url, image, path } = (part ?? {}) as Readonly<Record<string, unknown>>;
	const name = type === "image" || type === "image_url" ? firstNamed(url ?? image ?? path) : null;
	return name === null ? [] : [name];
}

/** The JSON record of a crude sample; empty where it has none. A list holds turns, as Megatron's LLaVA example writes them. */
export function recordOf(fields: Readonly<Record<string, unknown>>): Readonly<Record<string, unknown>> {
	const json = Object.entries(fields).find(([name]) => name === "json" || name.endsWith(".json"))?.[1];
	if (Array.isArray(json)) return { conversations: json };
	return typeof json === "object" && json !== null ? (json as Record<string, unknown>) : {};
}

/** Why a crude sample, its fields by extension, needs media that it does not have or that cannot be read; or null. */
export function mediaOfCrude(fields: Readonly<Record<string, unknown>>): string | null {
	const parts = Object.keys(fields);
	const record = recordOf(fields);
	const unreadable = unreadableMedia(parts, record);
	if (unreadable !== null) return unreadable;
	const hasImages = parts.some(isImageExtension) || parts.includes(NAMED_IMAGES);
	const named = hasImages ? null : namedMedia(record, "image");
	return named === null ? null : `${named}, but it has no image part; ${imagesInTars}`;
}

/**
 * Why a record of the JSONL file `path` cannot be trained on: it has no room for media, but auxiliary data may have its
 * images. Null: it can be.
 */
export function mediaOfRecord(record: unknown, path: string, hasAux = false): string | null {
	if (typeof record !== "object" || record === null) return null;
	const json = record as Readonly<Record<string, unknown>>;
	const other = unreadableMedia([], json);
	if (other !== null) return other;
	const image = hasAux ? null : (namedMedia(json, "image") ?? taggedMedia(json, "image"));
	if (image !== null) {
		const line = importLine(path) ?? "`mimo data import`";
		return `${image}, but a JSONL file has no images; ${line} makes a data set with them, and aux of a metadataset names where they are`;
	}
	const tagged = taggedMedia(json, "video") ?? taggedMedia(json, "audio");
	return tagged === null ? null : `${tagged}, and neither video nor audio is built yet`;
}

/** Why a sample is a video or a sound, with its parts and its JSON record; null where it is neither. */
function unreadableMedia(parts: readonly string[], record: Readonly<Record<string, unknown>>): string | null {
	for (const kind of ["video", "audio"] as const) {
		const part = parts.find((extension) => mediaOfExtension(extension) === kind);
		const why =
			part === undefined ? namedMedia(record, kind) : `its part ${part} is ${kind === "video" ? "a video" : "audio"}`;
		if (why !== null) return `${why}, and ${kind} is not built yet`;
	}
	return null;
}

// Documents of text and images in the forms of OBELICS (`texts` and `images`; each place has either) and MMC4
// (`text_list` and `image_info`, each image with the sentence that it belongs to).

interface InterleavedRecord {
	/** Text, and images by their number among `names`. */
	readonly fragments: readonly (string | { readonly image: number })[];
	/** How the record gives its images: names, or whatever else. */
	readonly names: readonly unknown[];
}

type Fields = Readonly<Record<string, unknown>>;

/** The document of a record; a sentence if the record has the form and a mistake; null if it has another form. */
export function interleavedRecord(record: Fields): InterleavedRecord | string | null {
	const { texts, images, text_list: sentences, image_info: info } = record;
	if (Array.isArray(sentences) && Array.isArray(info)) return mmc4(sentences, info);
	if (Array.isArray(texts) && Array.isArray(images) && texts.every((text) => text === null || isText(text))) {
		return obelics(texts, images);
	}
	return null;
}

const isText = (value: unknown): value is string => typeof value === "string";

function obelics(texts: readonly (string | null)[], images: readonly unknown[]): InterleavedRecord | string {
	if (texts.length !== images.length) {
		return `it has ${counted(texts.length, "text")} and ${counted(images.length, "image")}; each place of a document has one of both, null the other`;
	}
	const names: unknown[] = [];
	const fragments: (string | { image: number })[] = [];
	for (const [i, text] of texts.entries()) {
		const image = images[i];
		const hasImage = image !== null && image !== undefined && image !== "";
		if (hasImage && text) return `place ${i} of the document has both a text and an image`;
		if (text) fragments.push(text);
		if (hasImage) fragments.push({ image: names.push(image) - 1 });
	}
	return { fragments, names };
}

/** Images come before their sentences, as the SimilarityInterleavedSample of Energon has them. */
function mmc4(sentences: readonly unknown[], info: readonly unknown[]): InterleavedRecord | string {
	const texts = sentences.filter(isText);
	if (texts.length !== sentences.length) return "its text_list has an entry that is not text";
	const before = new Map<number, number[]>();
	const names: unknown[] = [];
	for (const entry of info) {
		if (typeof entry !== "object" || entry === null) return "its image_info has an entry that is not an image";
		const { image_name: name, matched_text_index: at, image_base64: coded, raw_url: url } = entry as Fields;
		const place = Number(at ?? 0);
		if (!(Number.isInteger(place) && place >= 0 && place < texts.length)) {
			return `an image of it belongs to text ${String(at).slice(0, 40)} of ${texts.length}`;
		}
		before.set(place, [...(before.get(place) ?? []), names.push(coded ?? name ?? url ?? null) - 1]);
	}
	const fragments = texts.flatMap((text, i) => [
		...(before.get(i) ?? []).map((image) => ({ image })),
		i === 0 ? text : `\n${text}`,
	]);
	return { fragments, names };
}

/** A list whose names of image parts ("extension", "key.extension" or {"image": name}) are replaced by the images. */
export function namedParts(value: unknown, raw: RawSample, decode: DecodeOptions): unknown {
	if (!Array.isArray(value)) return value;
	return value.map((item: unknown) => {
		const given = typeof item === "object" && item !== null ? (item as { image?: unknown }).image : item;
		if (typeof given !== "string" || !isImageExtension(given)) return item;
		const extension = given.startsWith(`${raw.key}.`) ? given.slice(raw.key.length + 1) : given;
		const bytes = raw.parts.get(extension);
		if (bytes !== undefined) return decodeParts({ ...raw, parts: new Map([[extension, bytes]]) }, decode)[extension];
		if (given === item) return item;
		throw new SampleError(
			`Sample ${raw.key} names the image part ${JSON.stringify(given)}, which it does not have.`,
			raw.key,
		);
	});
}

/** A crude sample with the images that its record names; each is from the first store that has it. */
export function withAux(sample: Sample, stores: readonly FileStore[], decode: DecodeOptions): Sample {
	if (stores.length === 0 || decode === null || decode.images === null) return sample;
	const { images } = decode;
	const named = imageNamesOf(recordOf(sample.fields)).map((name) => {
		const bytes = typeof name === "string" ? readFirst(stores, name) : null;
		if (bytes === null) {
			const where = stores.map((store) => store.name).join(", ");
			throw new SampleError(
				`Sample ${sample.key} names the image ${JSON.stringify(name)}, which its auxiliary data (${where}) do not have.`,
				sample.key,
			);
		}
		return decodeImage(sample, String(name), bytes, images);
	});
	return named.length === 0 ? sample : { ...sample, fields: { ...sample.fields, [NAMED_IMAGES]: named } };
}

function readFirst(stores: readonly FileStore[], name: string): Uint8Array | null {
	for (const store of stores) {
		const bytes = store.read(name);
		if (bytes !== null) return bytes;
	}
	return null;
}

/** Decodes an image of auxiliary data; errors are those of a part. */
function decodeImage({ key }: Sample, name: string, bytes: Uint8Array, images: ImageDecoder): unknown {
	const raw = { key, shard: "aux", sources: [], parts: new Map([["image.jpg", bytes]]) };
	try {
		return decodeParts(raw, { images })["image.jpg"];
	} catch (error) {
		if (!(error instanceof SampleError)) throw error;
		const why = error.message.replace(/^.*cannot be decoded: /s, "");
		throw new SampleError(
			`Sample ${key}: the image ${JSON.stringify(name)} of its auxiliary data cannot be decoded: ${why}`,
			key,
		);
	}
}

// Decodes the parts of a sample by their extension, as Energon's default decoder does (docs/spec/energon.md §1.6).

/** Decodes an image file; throws where it is damaged or of an unknown format. */
export type ImageDecoder = (bytes: Uint8Array) => unknown;

/** The parts to decode; null: every part stays bytes. */
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
