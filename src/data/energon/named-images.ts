/** Images that a sample names: among its own parts, or in auxiliary data. */
import { imageNamesOf, NAMED_IMAGES, recordOf } from "../vision-language/media.ts";
import { SampleError } from "./errors.ts";
import { type DecodeOptions, decodeParts, type ImageDecoder, isImageExtension } from "./format/decode.ts";
import type { FileStore } from "./format/file-store.ts";
import type { RawSample, Sample } from "./sample.ts";

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
