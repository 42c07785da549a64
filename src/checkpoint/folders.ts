/**
 * Folders that are either whole or not there: built beside their name, then renamed (docs/spec/checkpoint.md §7); and the file in a written
 * Hugging Face folder that names its training, so that a run replaces only folders that the same training wrote.
 */
import { existsSync, mkdirSync, readdirSync, realpathSync, renameSync, rmSync, statSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { UserError } from "../system/errors.ts";
import { readWholeText } from "../system/input-file.ts";
import { fileError } from "../system/system-errors.ts";
import { type Durability, syncFolder, temporaryName } from "./files.ts";

/** Refuses a target that already holds something. */
export function requireEmptyTarget(path: string): void {
	if (!existsSync(path)) return;
	if (!statSync(path).isDirectory()) throw new UserError(`Cannot write to ${path}: it is a file.`);
	if (readdirSync(path).length > 0) {
		throw new UserError(`Cannot write to ${path}: the folder is not empty (--force replaces it).`);
	}
}

/**
 * Lets `build` fill a new folder and gives it the name `path` once it is complete (and durable, unless `sync` is false). An existing folder is
 * refused unless `replace` is set; then it is moved aside first and deleted last. A failure leaves the old state.
 */
export async function writeFolderAtomically<T>(
	path: string,
	options: { readonly replace?: boolean } & Durability,
	build: (folder: string) => T | Promise<T>,
): Promise<T> {
	// A link to a folder on another disk stays, and the folder lies there.
	const target = existsSync(path) ? realpathSync(path) : resolve(path);
	if (!options.replace) requireEmptyTarget(target);
	const temporary = temporaryName(target);
	let result: T;
	try {
		mkdirSync(temporary, { recursive: true });
		result = await build(temporary);
		syncFolder(temporary, options);
		const old = existsSync(target) ? `${temporary}-old` : null;
		if (old) renameSync(target, old);
		renameSync(temporary, target);
		syncFolder(dirname(target), options);
		if (old) rmSync(old, { recursive: true, force: true });
	} catch (error) {
		rmSync(temporary, { recursive: true, force: true });
		if (error instanceof UserError || (error as NodeJS.ErrnoException).code === undefined) throw error;
		throw fileError("write", path, error);
	}
	return result;
}

/** A name that stays inside its folder: no separator, no "..", no control character. */
export function requirePlainName(name: string, where: string): string {
	// biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are refused here
	if (["", ".", ".."].includes(name) || basename(name) !== name || name.includes("\\") || /[\0-\x1f]/.test(name)) {
		throw new UserError(`${where} names the file ${JSON.stringify(name)}, which is not a plain file name.`);
	}
	return name;
}

export const ownershipFile = "mimo.json";
/** In that of a folder on a disk. */
export const diskFormat = "mimo-weights";
/** Bytes of the largest such file. */
const LARGEST_RECORD = 4096;

/** Content of the file. `lineage`: name of the run that began the training. */
export function ownershipText(lineage: string): string {
	return `${JSON.stringify({ format: diskFormat, lineage })}\n`;
}

/**
 * Whether a training may write a folder of this path: it does not exist, is empty, or was written by the same training.
 */
export function mayWrite(path: string, lineage: string | null): boolean {
	if (!existsSync(path)) return true;
	if (!statSync(path).isDirectory()) return false;
	if (readdirSync(path).length === 0) return true;
	if (lineage === null) return false;
	try {
		return readWholeText(join(path, ownershipFile), LARGEST_RECORD, { inside: path }) === ownershipText(lineage);
	} catch {
		return false;
	}
}
