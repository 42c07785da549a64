/**
 * A cache of blocks of remote files on a local disk, shared by the processes of a user. Its size is bounded; blocks are signed
 * with the folder's key and verified when they are read.
 */
import { createHmac, randomBytes, randomUUID, timingSafeEqual } from "node:crypto";
import { linkSync, readdirSync, readFileSync, renameSync, rmSync, statSync, utimesSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { openOwnFolder, readOwnFile } from "../../../system/private-folder.ts";
import type { RemoteVersion } from "./storage.ts";

/** Bytes of the signature at the end of a block's file. */
export const SIGNATURE_BYTES = 32;
/** Blocks that are written between two counts of the folder, to which other processes write too. */
const LOOK = 64;
/** Milliseconds after which an unfinished block counts as abandoned by its process. */
const ABANDONED = 600_000;

const blockName = /^[0-9a-f]{40}-\d{1,16}$/;
const unfinishedName = /^[0-9a-f]{40}-\d{1,16}\.\d+\.[0-9a-f-]{36}\.part$/;

/** File of a block. */
export function blockPath({ path }: CacheFolder, { url, size, cacheName }: RemoteVersion, block: number): string {
	const name = new Bun.CryptoHasher("sha256").update(JSON.stringify([url, size, cacheName])).digest("hex");
	return join(path, `${name.slice(0, 40)}-${block}`);
}

/** A block's bytes; null if it is absent, damaged, or not signed with the folder's key. */
export function readBlock(folder: CacheFolder, path: string, length: number): Uint8Array | null {
	let bytes: Uint8Array | null = null;
	try {
		// A file of another length is not read.
		if (statSync(path).size === length + SIGNATURE_BYTES) bytes = readFileSync(path);
		const now = new Date();
		utimesSync(path, now, now);
	} catch {
		return null;
	}
	const content = bytes?.subarray(0, -SIGNATURE_BYTES);
	const signature = bytes?.subarray(-SIGNATURE_BYTES);
	if (content?.length === length && timingSafeEqual(signature!, sign(folder, path, content))) return content;
	rmSync(path, { force: true });
	return null;
}

/** The signature of a block's name and content, so that no block can replace another. */
function sign({ key }: CacheFolder, path: string, content: Uint8Array): Buffer {
	return createHmac("sha256", key)
		.update(`${basename(path)}\0`)
		.update(content)
		.digest();
}

/** Writes blocks and removes the least recently used ones. Other files are neither counted nor removed. */
export class BlockWriter {
	#bytes = 0;
	#sinceLook = LOOK;

	constructor(
		private readonly folder: CacheFolder,
		private readonly limit: number,
	) {}

	write(path: string, bytes: Uint8Array): void {
		const unfinished = `${path}.${process.pid}.${crypto.randomUUID()}.part`;
		try {
			writeFileSync(unfinished, Buffer.concat([bytes, sign(this.folder, path, bytes)]), { mode: 0o600, flag: "wx" });
			renameSync(unfinished, path);
		} catch (error) {
			rmSync(unfinished, { force: true });
			throw error;
		}
		this.#bytes += bytes.length + SIGNATURE_BYTES;
		this.#sinceLook++;
		if (this.#bytes > this.limit || this.#sinceLook >= LOOK) this.#shrink(path);
	}

	/**
	 * Counts the blocks of the folder and removes the least recently used ones beyond the limit, but never the newest block.
	 */
	#shrink(newest: string): void {
		this.#sinceLook = 0;
		const blocks: { readonly path: string; readonly size: number; readonly used: number }[] = [];
		for (const name of readdirSync(this.folder.path)) {
			if (!blockName.test(name) && !unfinishedName.test(name)) continue;
			const path = join(this.folder.path, name);
			const stat = statSync(path, { throwIfNoEntry: false });
			if (stat === undefined) continue;
			if (blockName.test(name)) blocks.push({ path, size: stat.size, used: stat.mtimeMs });
			else if (Date.now() - stat.mtimeMs > ABANDONED) rmSync(path, { force: true });
		}
		this.#bytes = blocks.reduce((sum, { size }) => sum + size, 0);
		blocks.sort((a, b) => a.used - b.used);
		for (const { path, size } of blocks) {
			if (this.#bytes <= this.limit) break;
			if (path === newest) continue;
			rmSync(path, { force: true });
			this.#bytes -= size;
		}
	}
}

/** Plain values, which can be sent to other threads. */
export interface CacheFolder {
	readonly path: string;
	/** Signs the blocks. */
	readonly key: Uint8Array;
}

const KEY_BYTES = 32;
const KEY_FILE = "key";

/** Opens or creates the cache folder below `parent`. Throws the UserErrors of `openOwnFolder`. */
export function openCacheFolder(parent: string): CacheFolder {
	const path = openOwnFolder(parent, "mimo-blocks-v1", "--data-cache-folder");
	return { path, key: readKey(join(path, KEY_FILE)) ?? makeKey(join(path, KEY_FILE)) };
}

/** The key of a folder; null: no key exists yet. */
function readKey(path: string): Uint8Array | null {
	const refuse = (): never => {
		throw new UserError(`${path} is not a key that this user created for the cache: remove its folder.`);
	};
	const key = readOwnFile(path, refuse);
	return key === null || key.length === KEY_BYTES ? key : refuse();
}

/** Creates a key; where several processes do so at once, the first key is used. */
function makeKey(path: string): Uint8Array {
	const unfinished = `${path}.${randomUUID()}`;
	try {
		writeFileSync(unfinished, randomBytes(KEY_BYTES), { mode: 0o600, flag: "wx" });
		try {
			linkSync(unfinished, path);
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
		}
	} catch (error) {
		throw new UserError(`The cache's key ${path} cannot be written: ${(error as Error).message}.`);
	} finally {
		rmSync(unfinished, { force: true });
	}
	const key = readKey(path);
	if (key === null) throw new UserError(`The cache's key ${path} was removed as soon as it was written.`);
	return key;
}
