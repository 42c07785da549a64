/** The user's private folder of copies of remote data, with the key that signs its blocks. */
import { randomBytes, randomUUID } from "node:crypto";
import { linkSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { openOwnFolder, readOwnFile } from "../../../system/private-folder.ts";

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
