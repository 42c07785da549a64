/** Reads the bytes of an image from a record, file or URL, and checks its header. */
import { readWholeFile } from "../../checkpoint/files.ts";
import type { ImageFormat, Images } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";
import { RemoteError, type RequestOptions, readRemote, statRemote } from "../energon/storage/http.ts";
import type { EncodedImage } from "../vision-language/encoded-image.ts";
import type { ImageReference } from "./image-reference.ts";
import { SkippedRow } from "./row.ts";

/** Bytes of the largest image file. */
export const LARGEST_IMAGE = 2 ** 28;

const requests: RequestOptions = {
	attempts: 3,
	backoffMilliseconds: 250,
	stallMilliseconds: 20_000,
	timeoutMilliseconds: 300_000,
	privateRedirects: false,
};

const extensions: Readonly<Record<ImageFormat, string>> = {
	JPEG: "jpg",
	PNG: "png",
	WebP: "webp",
	GIF: "gif",
	BMP: "bmp",
};

export interface ImageFile extends EncodedImage {
	/** Extension of the image's format, which may differ from its name. */
	readonly extension: string;
	/** Path or URL; null: it was in the record. */
	readonly name: string | null;
}

/** The image of a reference; a promise for an image on a server. Throws a SkippedRow with the reason if it cannot be read. */
export function fetchImage(reference: ImageReference, images: Images, decode: boolean): ImageFile | Promise<ImageFile> {
	switch (reference.kind) {
		case "bytes":
			return checked(reference.bytes, images, decode, null);
		case "file":
			return checked(readFile(reference.path), images, decode, reference.path);
		case "url":
			return download(reference.url).then((bytes) => checked(bytes, images, decode, reference.url));
	}
}

function readFile(path: string): Uint8Array {
	try {
		return readWholeFile(path, LARGEST_IMAGE);
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		throw new SkippedRow(`the image cannot be read (${error.message.replace(/\.$/, "")})`);
	}
}

async function download(url: string): Promise<Uint8Array> {
	try {
		const { size, etag } = await statRemote(url, requests);
		if (size > LARGEST_IMAGE)
			throw new SkippedRow(`the image ${url} has ${size} bytes; at most ${LARGEST_IMAGE} are read`);
		return await readRemote({ url, size, etag }, 0, size, requests);
	} catch (error) {
		if (!(error instanceof RemoteError)) throw error;
		throw new SkippedRow(`the image cannot be fetched (${error.message.replace(/\.$/, "")})`);
	}
}

function checked(bytes: Uint8Array, images: Images, decode: boolean, name: string | null): ImageFile {
	try {
		const header = images.inspect(bytes);
		if (decode) images.decode(bytes);
		return { ...header, file: bytes, extension: extensions[header.format], name };
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		const which = name === null ? "an image" : `the image ${JSON.stringify(name)}`;
		throw new SkippedRow(`${which} cannot be used (${error.message.replace(/\.$/, "")})`);
	}
}
