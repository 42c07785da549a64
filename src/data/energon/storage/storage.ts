/**
 * Storage of datasets. Reading is synchronous: it returns when the bytes are read, or fetched by another thread (remote.ts).
 * Paths are file paths or URLs with forward slashes.
 */
import { UserError } from "../../../system/errors.ts";

export interface ReadOptions {
	/** The bytes of a local file may come from the disk when they are used. */
	readonly lazily?: boolean;
}

/** A file that is open for reading at any offset. */
export interface RandomAccessFile {
	readonly path: string;
	readonly size: number;
	/** Bytes [offset, offset + length), cut at the end of the file. Valid until the file is closed. */
	read(offset: number, length: number, options?: ReadOptions): Uint8Array;
	close(): void;
}

export interface Storage {
	/** Opens a file; throws a UserError when it does not exist or cannot be read. */
	open(path: string): RandomAccessFile;
	/** The whole file as text. Throws a UserError for a file of more than `LARGEST_TEXT` bytes. */
	readText(path: string): string;
	isFile(path: string): boolean;
	isFolder(path: string): boolean;
}

/** Bytes of the largest description (`.info.json`, `split.yaml`, a metadataset) that is read. */
const LARGEST_TEXT = 2 ** 28;

/** The whole content of an open file as text. Closes the file. */
export function textOf(file: RandomAccessFile): string {
	try {
		if (file.size > LARGEST_TEXT) {
			throw new UserError(`${file.path} has ${file.size} bytes; a description has at most ${LARGEST_TEXT}.`);
		}
		return new TextDecoder("utf-8", { ignoreBOM: true }).decode(file.read(0, file.size));
	} finally {
		file.close();
	}
}

const url = /^[a-z][a-z0-9+.-]*:\/\//i;

export function isUrl(path: string): boolean {
	return url.test(path);
}

/** `path` relative to the folder `base`, where `..` is resolved; absolute paths and URLs do not depend on `base`. */
export function resolvePath(base: string, path: string): string {
	if (isUrl(path)) return normalize(path);
	if (path.startsWith("/")) return normalize(path);
	return normalize(base === "" ? path : `${base}/${path}`);
}

function normalize(path: string): string {
	const scheme = url.exec(path)?.[0] ?? "";
	const rest = path.slice(scheme.length);
	const rooted = scheme === "" && rest.startsWith("/");
	const parts: string[] = [];
	for (const part of rest.split("/")) {
		if (part === "" || part === ".") continue;
		if (part === ".." && parts.length > 0 && parts[parts.length - 1] !== "..") parts.pop();
		else if (part !== ".." || !rooted) parts.push(part);
	}
	return scheme + (rooted ? "/" : "") + parts.join("/");
}

/** Folder of a path. */
export function folderOf(path: string): string {
	const slash = path.lastIndexOf("/");
	if (slash < 0) return "";
	return slash === 0 ? "/" : path.slice(0, slash);
}

/** Last component of a path. */
export function nameOf(path: string): string {
	return path.slice(path.lastIndexOf("/") + 1);
}

/** How remote files are fetched, as plain values that can be sent to other threads. */
export interface RemoteOptions {
	/** Parent of the disk cache's folder, which the processes of a user on a host share. */
	readonly cacheFolder: string;
	/** Most bytes of the disk cache. */
	readonly cacheBytes: number;
	/** Bytes fetched at once. */
	readonly blockBytes: number;
	/** Blocks fetched ahead of the one that is read. */
	readonly readAhead: number;
	/** Number of attempts of a read, and the pause after the first attempt, which doubles after each. */
	readonly attempts: number;
	readonly backoffMilliseconds: number;
	/** Milliseconds without data after which a connection counts as failed. */
	readonly stallMilliseconds: number;
	/** Milliseconds after which a piece of a file, all attempts included, or a read of a local file counts as stuck. */
	readonly timeoutMilliseconds: number;
	/** Follow redirects to other hosts inside the user's own network. */
	readonly privateRedirects: boolean;
}

/** The version of a file at its opening. */
export interface RemoteVersion {
	readonly url: string;
	readonly size: number;
	/** The server's ETag or Last-Modified header; null: the server sends neither. */
	readonly etag: string | null;
	/** Name of the version in the cache: the tag, or a random name of this run. */
	readonly cacheName: string;
}
