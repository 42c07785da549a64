import { closeSync, fsyncSync, mkdirSync, openSync, renameSync, writeSync } from "node:fs";
import { basename, dirname, join } from "node:path";

/** Writes a small file atomically: after a crash it has either the old or the new content. Creates its folder. */
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
