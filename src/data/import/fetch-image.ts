/** Reads the bytes of an image from a record, file or URL, and checks its header. */
import { resolve } from "node:path";
import type { ImageFormat, Images } from "../../native/images.ts";
import { privateAddress, shownAddress } from "../../system/addresses.ts";
import { UserError } from "../../system/errors.ts";
import { readWholeFile } from "../../system/input-file.ts";
import { RemoteError, type RequestOptions, readRemote, statRemote } from "../energon/storage/http.ts";
import { isUrl } from "../energon/storage/storage.ts";
import type { EncodedImage } from "../vision-language/pixels.ts";
import { SkippedRow } from "./row.ts";

// Finds the images of a record's fields: bytes, paths, URLs, or base64.

export type ImageReference =
	| { readonly kind: "bytes"; readonly bytes: Uint8Array }
	| { readonly kind: "file"; readonly path: string }
	| { readonly kind: "url"; readonly url: string };

/** First characters of images in base64: JPEG, PNG, GIF, RIFF (WebP), BMP. */
const base64Beginnings = ["/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk"];
/** Characters of the shortest text that counts as base64; shorter texts are paths. */
const SHORTEST_BASE64 = 60;
const base64 = /^[A-Za-z0-9+/\s]+={0,2}\s*$/;

/** References of a field's image, or list of images. Paths are relative to `folder`. Throws a SkippedRow for other values. */
export function imageReferences(value: unknown, folder: string): ImageReference[] {
	if (value === null || value === undefined || value === "") return [];
	if (Array.isArray(value)) return value.flatMap((item) => imageReferences(item, folder));
	if (value instanceof Uint8Array) return [{ kind: "bytes", bytes: value }];
	if (typeof value === "string") {
		const list = listInText(value);
		return list === null ? [ofText(value, folder)] : imageReferences(list, folder);
	}
	if (typeof value === "object") {
		const { bytes, path, url, src, data, base64: coded, image } = value as Record<string, unknown>;
		const inner = [bytes, url, path, src, data, coded, image].find((one) => one !== null && one !== undefined);
		if (inner !== undefined && !Array.isArray(inner)) return imageReferences(inner, folder);
	}
	throw new SkippedRow(`an image is given as ${brief(value)}, which is neither bytes nor a path nor a URL`);
}

function brief(value: unknown): string {
	const text = typeof value === "object" ? Object.keys(value as object).join(", ") : String(value);
	return `${Array.isArray(value) ? "a list" : typeof value} (${text.slice(0, 60)})`;
}

/** The JSON list in a cell of a table; null for other text. */
function listInText(text: string): unknown[] | null {
	if (!/^\s*\[\s*["\]]/.test(text)) return null;
	try {
		const value: unknown = JSON.parse(text);
		return Array.isArray(value) ? value : null;
	} catch {
		return null;
	}
}

function ofText(text: string, folder: string): ImageReference {
	if (/^data:/i.test(text)) {
		const comma = text.indexOf(",");
		const head = text.slice(0, Math.max(0, comma)).toLowerCase();
		if (!head.endsWith(";base64")) throw new SkippedRow("an image is a data URI that is not in base64");
		return { kind: "bytes", bytes: decode(text.slice(comma + 1)) };
	}
	if (/^file:\/\//i.test(text)) return { kind: "file", path: resolve(folder, decodeFileUrl(text)) };
	if (isUrl(text)) {
		if (/^(?:https?|s3):\/\//i.test(text)) return { kind: "url", url: text };
		throw new SkippedRow(
			`an image has the URL ${JSON.stringify(text.slice(0, 100))}; http, https, s3 and file are read`,
		);
	}
	if (text.length >= SHORTEST_BASE64 && base64Beginnings.some((start) => text.startsWith(start)) && base64.test(text)) {
		return { kind: "bytes", bytes: decode(text) };
	}
	if (text.includes("\0") || text.length > 4096) {
		throw new SkippedRow("an image is given as text that is neither a path nor a URL nor base64");
	}
	return { kind: "file", path: resolve(folder, text) };
}

function decodeFileUrl(text: string): string {
	try {
		return Bun.fileURLToPath(text);
	} catch {
		throw new SkippedRow(`an image has the URL ${JSON.stringify(text.slice(0, 100))}, which names no file`);
	}
}

function decode(text: string): Uint8Array {
	const compact = text.trim();
	if (!base64.test(compact)) throw new SkippedRow("an image in base64 has characters that base64 does not have");
	return new Uint8Array(Buffer.from(compact, "base64"));
}

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
