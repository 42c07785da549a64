/**
 * The folder that copies of remote data lie in: a folder of this program's own, made and read by its user alone, with
 * the key that its blocks are signed with. Write access to the folder around it is not enough to plant blocks.
 */
import { randomBytes, randomUUID } from "node:crypto";
import {
	closeSync,
	constants,
	fstatSync,
	linkSync,
	lstatSync,
	mkdirSync,
	openSync,
	readSync,
	rmSync,
	writeFileSync,
} from "node:fs";
import { homedir } from "node:os";
import { isAbsolute, join } from "node:path";
import { UserError } from "../../../native/errors.ts";

/** Plain values, so that they reach other threads. */
export interface CacheFolder {
	readonly path: string;
	/** Signs the blocks. */
	readonly key: Uint8Array;
}

const KEY_BYTES = 32;
const KEY_FILE = "key";

/** Where blocks lie when no folder is named: the user's cache folder. */
export function defaultCacheFolder(environment: Readonly<Record<string, string | undefined>> = process.env): string {
	const named = environment.XDG_CACHE_HOME ?? "";
	return join(isAbsolute(named) ? named : join(homedir(), ".cache"), "mimo");
}

/**
 * The cache folder below `parent`, made where it is missing. Throws a UserError where it is a link, belongs to another
 * user, is open to others, or cannot be made.
 */
export function openCacheFolder(parent: string): CacheFolder {
	const user = process.geteuid!();
	const path = join(parent, `mimo-blocks-v1-${user}`);
	try {
		mkdirSync(parent, { recursive: true });
		mkdirSync(path, { mode: 0o700 });
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code !== "EEXIST") {
			throw new UserError(
				`The cache folder ${path} cannot be made: ${(error as Error).message}; --data-cache-folder names another.`,
			);
		}
	}
	const refuse = (what: string): never => {
		throw new UserError(`The cache folder ${path} ${what}; remove it, or name another with --data-cache-folder.`);
	};
	const stat = lstatSync(path, { throwIfNoEntry: false });
	if (stat === undefined) return refuse("cannot be reached");
	if (stat.isSymbolicLink()) refuse("is a symbolic link");
	if (!stat.isDirectory()) refuse("is no folder");
	if (stat.uid !== user) refuse(`belongs to another user (${stat.uid})`);
	if ((stat.mode & 0o077) !== 0) refuse("is open to other users");
	return { path, key: readKey(join(path, KEY_FILE)) ?? makeKey(join(path, KEY_FILE)) };
}

/** The key of a folder; null before its first block. */
function readKey(path: string): Uint8Array | null {
	let descriptor: number;
	try {
		descriptor = openSync(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code === "ENOENT") return null;
		throw new UserError(`The key ${path} of the cache cannot be opened: ${(error as Error).message}.`);
	}
	try {
		const stat = fstatSync(descriptor);
		const key = new Uint8Array(KEY_BYTES);
		const own = stat.isFile() && stat.uid === process.geteuid!() && (stat.mode & 0o077) === 0;
		if (!own || stat.size !== KEY_BYTES || readSync(descriptor, key) !== KEY_BYTES) {
			throw new UserError(`${path} is no key that this user made for the cache: remove the folder it lies in.`);
		}
		return key;
	} finally {
		closeSync(descriptor);
	}
}

/** Makes a key; where several processes do so at once, the first key counts. */
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
	if (key === null) throw new UserError(`The cache's key ${path} is gone as soon as it was written.`);
	return key;
}
