/**
 * The owner of a written Hugging Face folder: a file in it names the training, so that a run replaces only folders that
 * the same training wrote.
 */
import { existsSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";

export const ownershipFile = "mimo.json";
/** Bytes of the largest such file. */
const LARGEST_RECORD = 4096;

/** Content of the file. `lineage`: name of the run that began the training. */
export function ownershipText(lineage: string): string {
	return `${JSON.stringify({ format: "mimo-weights", lineage })}\n`;
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

/** Throws a UserError unless `mayWrite`. */
export function requireWritable(path: string, lineage: string | null, flag = "save-hf"): void {
	if (mayWrite(path, lineage)) return;
	throw new UserError(
		`--${flag} ${path} exists, and this training has not written it: name another folder, or remove this one.`,
	);
}
