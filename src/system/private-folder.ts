/**
 * Private cache folders and files, which one user alone creates and reads: other users of the parent folder cannot plant files
 * in them.
 */

import { randomUUID } from "node:crypto";
import {
	closeSync,
	constants,
	fstatSync,
	lstatSync,
	mkdirSync,
	openSync,
	readFileSync,
	renameSync,
	rmSync,
	writeFileSync,
} from "node:fs";
import { homedir } from "node:os";
import { isAbsolute, join } from "node:path";
import { UserError } from "./errors.ts";

/** The default parent of caches: the user's cache folder. */
export function defaultCacheFolder(environment: Readonly<Record<string, string | undefined>> = process.env): string {
	const named = environment.XDG_CACHE_HOME ?? "";
	return join(isAbsolute(named) ? named : join(homedir(), ".cache"), "mimo");
}

/**
 * Path of the user's own folder `name` below `parent`, made if missing. Throws a UserError, which advises `flag`, if the folder
 * is a link, belongs to another user, is open to others or cannot be made.
 */
export function openOwnFolder(parent: string, name: string, flag: string): string {
	const user = process.geteuid!();
	const path = join(parent, `${name}-${user}`);
	try {
		mkdirSync(parent, { recursive: true });
		mkdirSync(path, { mode: 0o700 });
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code !== "EEXIST") {
			throw new UserError(
				`The cache folder ${path} cannot be made: ${(error as Error).message}; ${flag} names another.`,
			);
		}
	}
	const refuse = (what: string): never => {
		throw new UserError(`The cache folder ${path} ${what}; remove it, or name another with ${flag}.`);
	};
	const stat = lstatSync(path, { throwIfNoEntry: false });
	if (stat === undefined) return refuse("cannot be reached");
	if (stat.isSymbolicLink()) refuse("is a symbolic link");
	if (!stat.isDirectory()) refuse("is not a folder");
	if (stat.uid !== user) refuse(`belongs to another user (${stat.uid})`);
	if ((stat.mode & 0o077) !== 0) refuse("is open to other users");
	return path;
}

/**
 * Reads a file in a user's own folder; null if the file does not exist. Throws a UserError if the file cannot be opened. Calls
 * `refuse`, which throws, if the path is not a regular file, or another user owns the file or has access to it.
 */
export function readOwnFile(path: string, refuse: () => never): Uint8Array | null {
	let descriptor: number;
	try {
		descriptor = openSync(path, constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code === "ENOENT") return null;
		throw new UserError(`${path} of the cache cannot be opened: ${(error as Error).message}.`);
	}
	try {
		const stat = fstatSync(descriptor);
		if (!stat.isFile() || stat.uid !== process.geteuid!() || (stat.mode & 0o077) !== 0) refuse();
		return readFileSync(descriptor);
	} finally {
		closeSync(descriptor);
	}
}

/** Atomically writes or replaces a file in the user's private folder, readable by the user alone. */
export function replaceOwnFile(path: string, content: string | Uint8Array): void {
	const unfinished = `${path}.${randomUUID()}`;
	try {
		writeFileSync(unfinished, content, { mode: 0o600, flag: "wx" });
		renameSync(unfinished, path);
	} catch (error) {
		throw new UserError(`${path} of the cache cannot be written: ${(error as Error).message}.`);
	} finally {
		rmSync(unfinished, { force: true });
	}
}
