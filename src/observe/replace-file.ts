import { closeSync, fsyncSync, mkdirSync, openSync, renameSync, writeSync } from "node:fs";
import { basename, dirname, join } from "node:path";

/** Writes a small file that is there whole or as it was before, also after a crash. Makes its folder. */
export function replaceFile(path: string, text: string): void {
	const folder = dirname(path);
	mkdirSync(folder, { recursive: true });
	const temporary = join(folder, `.${basename(path)}.${process.pid}.tmp`);
	const descriptor = openSync(temporary, "w");
	try {
		writeSync(descriptor, text);
		fsyncSync(descriptor);
	} finally {
		closeSync(descriptor);
	}
	renameSync(temporary, path);
}
