/** Reads the bytes of an image from a record, file or URL, and checks its header. */

import type { ImageFormat, Images } from "../../native/images.ts";
import { privateAddress, shownAddress } from "../../system/addresses.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeFile } from "../../system/input-file.ts";
import { RemoteError, type RequestOptions, readRemote, statRemote } from "../energon/storage/http.ts";
import type { EncodedImage } from "../vision-language/encoded-image.ts";
import type { ImageReference } from "./image-reference.ts";
import { SkippedRow } from "./row.ts";

/** Bytes of the largest image file. */
export const LARGEST_IMAGE = 2 ** 28;

const requests = {
	attempts: 3,
	backoffMilliseconds: 250,
	stallMilliseconds: 20_000,
	timeoutMilliseconds: 300_000,
} satisfies Partial<RequestOptions>;

/** The flag of `mimo data import` for URLs inside the own network. */
const privateFlag = "--private-addresses";

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

export interface FetchOptions {
	/** Decode the image, rather than only its header. */
	readonly decode: boolean;
	/** Whether URLs may lead to this machine and its own network; those of a foreign table could ask its services. */
	readonly privateAddresses: boolean;
}

/** The image of a reference; a promise for an image on a server. Throws a SkippedRow with the reason if it cannot be read. */
export function fetchImage(
	reference: ImageReference,
	images: Images,
	{ decode, privateAddresses }: FetchOptions,
): ImageFile | Promise<ImageFile> {
	switch (reference.kind) {
		case "bytes":
			return checked(reference.bytes, images, decode, null);
		case "file":
			return checked(readFile(reference.path), images, decode, reference.path);
		case "url":
			return download(reference.url, privateAddresses).then((bytes) => checked(bytes, images, decode, reference.url));
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

async function download(url: string, privateAddresses: boolean): Promise<Uint8Array> {
	const options: RequestOptions = { ...requests, privateRedirects: privateAddresses };
	// Where S3 is, the user's environment says.
	const parsed = /^https?:/i.test(url) && !privateAddresses ? URL.parse(url) : null;
	const inside = parsed === null ? null : await privateAddress(parsed);
	if (inside !== null) {
		throw new SkippedRow(
			`the image ${shownAddress(url)} is at ${inside}, inside this machine's own network: ${privateFlag} allows it`,
		);
	}
	try {
		const { size, etag } = await statRemote(url, options);
		if (size > LARGEST_IMAGE)
			throw new SkippedRow(`the image ${url} has ${size} bytes; at most ${LARGEST_IMAGE} are read`);
		return await readRemote({ url, size, etag }, 0, size, options);
	} catch (error) {
		if (!(error instanceof RemoteError)) throw error;
		const reason = error.message.replace("--data-private-redirects", privateFlag).replace(/\.$/, "");
		throw new SkippedRow(`the image cannot be fetched (${reason})`);
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
