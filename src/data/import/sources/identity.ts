/** The digest that identifies the files of an import. */

import { statSync } from "node:fs";
import { basename } from "node:path";
import { CryptoHasher } from "bun";
import { fileError } from "../../../system/system-errors.ts";
import type { InputFile } from "../detect.ts";

/** Digest of the names, sizes and times of change of files, in order. */
export function identityOf(files: readonly InputFile[]): string {
	const hash = new CryptoHasher("sha256");
	for (const { path, part } of files) {
		try {
			const { size, mtimeMs } = statSync(path);
			hash.update(JSON.stringify([basename(path), size, mtimeMs, part]));
		} catch (error) {
			throw fileError("open", path, error);
		}
	}
	return hash.digest("hex").slice(0, 16);
}
