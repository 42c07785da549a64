/** Opens the storage of a path: local files, or remote files with their cache. */

import { closeSync, constants, existsSync, fstatSync, openSync, readSync, statSync } from "node:fs";
import { UserError } from "../../../system/errors.ts";
import { defaultCacheFolder } from "../../../system/private-folder.ts";
import { watched } from "../../../system/read-watch.ts";
import { systemReason } from "../../../system/system-errors.ts";
import { RemoteStorage } from "./remote.ts";
import { isUrl, type RandomAccessFile, type ReadOptions, type RemoteOptions, type Storage, textOf } from "./storage.ts";

export interface StorageConfiguration extends Partial<Omit<RemoteOptions, "cacheFolder" | "cacheBytes">> {
	/** Parent of the folder of copies of remote data; null = the user's cache folder. */
	readonly cacheFolder: string | null;
	/** Most bytes of the disk cache; 0 = 16 GiB. */
	readonly cacheBytes: number;
}

/** Milliseconds. */
export const defaultTimeout = 60_000;

const defaults = {
	blockBytes: 1 << 20,
	readAhead: 2,
	attempts: 6,
	backoffMilliseconds: 250,
	stallMilliseconds: 20_000,
	timeoutMilliseconds: defaultTimeout,
	privateRedirects: false,
} as const;

export function openStorage({ cacheFolder, cacheBytes, ...rest }: StorageConfiguration): Storage {
	return new AnyStorage({
		...defaults,
		...rest,
		cacheFolder: cacheFolder ?? defaultCacheFolder(),
		cacheBytes: cacheBytes || 16 * 2 ** 30,
	});
}

/** Local and remote files by their path. */
class AnyStorage implements Storage {
	readonly #local = new LocalStorage();
	readonly #remote: RemoteStorage;

	constructor(options: RemoteOptions) {
		this.#remote = new RemoteStorage(options);
	}

	#of(path: string): Storage {
		return isUrl(path) ? this.#remote : this.#local;
	}

	open(path: string): RandomAccessFile {
		return this.#of(path).open(path);
	}

	readText(path: string): string {
		return this.#of(path).readText(path);
	}

	isFile(path: string): boolean {
		return this.#of(path).isFile(path);
	}

	isFolder(path: string): boolean {
		return this.#of(path).isFolder(path);
	}
}

// Local files, mapped into memory, or read by descriptor if they are too large for a view.

export class LocalStorage implements Storage {
	open(path: string): RandomAccessFile {
		return LocalFile.open(path);
	}

	readText(path: string): string {
		return textOf(LocalFile.open(path));
	}

	isFile(path: string): boolean {
		return watched(path, () => existsSync(path) && statSync(path).isFile());
	}

	isFolder(path: string): boolean {
		return watched(path, () => existsSync(path) && statSync(path).isDirectory());
	}
}

/** A value that is stored is computed. */
const sink = new Uint8Array(1);

/** Brings mapped bytes into memory by reading one of every page; the same bytes. */
export function broughtIn(bytes: Uint8Array): Uint8Array {
	let sum = bytes.at(-1) ?? 0;
	for (let at = 0; at < bytes.length; at += 4096) sum += bytes[at]!;
	sink[0] = sum;
	return bytes;
}

/** Bytes of the largest mapped file: views of native memory have less than 4 GiB. */
const LARGEST_MAPPING = 4294967295;

export class LocalFile implements RandomAccessFile {
	private constructor(
		readonly path: string,
		readonly size: number,
		/** The mapped file; null: the file is read by descriptor. */
		private mapped: Uint8Array | null,
		private descriptor: number | null,
	) {}

	static open(path: string): LocalFile {
		return watched(path, () => LocalFile.#open(path));
	}

	static #open(path: string): LocalFile {
		try {
			// O_NONBLOCK: opening a pipe must not wait for its writer.
			const descriptor = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
			const stat = fstatSync(descriptor);
			if (!stat.isFile()) {
				closeSync(descriptor);
				throw new UserError(`${path} is not a file.`);
			}
			if (stat.size > LARGEST_MAPPING) return new LocalFile(path, stat.size, null, descriptor);
			closeSync(descriptor);
			const mapped = stat.size === 0 ? new Uint8Array(0) : Bun.mmap(path, { shared: false });
			return new LocalFile(path, mapped.length, mapped, null);
		} catch (error) {
			if (error instanceof UserError) throw error;
			throw new UserError(`${path} cannot be opened: ${systemReason(error)}.`);
		}
	}

	read(offset: number, length: number, { lazily = false }: ReadOptions = {}): Uint8Array {
		const end = Math.min(offset + length, this.size);
		if (offset >= end) return new Uint8Array(0);
		if (this.mapped === null) return watched(this.path, () => this.#readAt(offset, end));
		const bytes = this.mapped.subarray(offset, end);
		return lazily ? bytes : watched(this.path, () => broughtIn(bytes));
	}

	#readAt(offset: number, end: number): Uint8Array {
		if (this.descriptor === null) throw new Error(`${this.path} was closed.`);
		const bytes = new Uint8Array(end - offset);
		let filled = 0;
		while (filled < bytes.length) {
			const count = readSync(this.descriptor, bytes, filled, bytes.length - filled, offset + filled);
			if (count === 0) break;
			filled += count;
		}
		return bytes.subarray(0, filled);
	}

	close(): void {
		this.mapped = null;
		if (this.descriptor !== null) closeSync(this.descriptor);
		this.descriptor = null;
	}
}
