/** Writes the files of a run's records (a record is appended whole, a file is replaced whole), and names the user of the run. */
import { closeSync, fstatSync, fsyncSync, ftruncateSync, mkdirSync, openSync, renameSync, writeSync } from "node:fs";
import { basename, dirname, join } from "node:path";

/**
 * Appends either all of `bytes` or no bytes to a file that is open for appending, so that later records follow whole records.
 * Throws where the disk has no room, and where the file was removed.
 */
export function appendWhole(descriptor: number, bytes: Uint8Array): void {
	const before = fstatSync(descriptor);
	if (before.isFile() && before.nlink === 0) throw new Error("it was removed");
	if (writeSync(descriptor, bytes) === bytes.length) return;
	if (before.isFile()) ftruncateSync(descriptor, before.size);
	throw new Error("the disk is full");
}

/** Appends a text to a file in the same way, and creates the file if it is missing. */
export function appendText(file: string, text: string): void {
	const descriptor = openSync(file, "a");
	try {
		appendWhole(descriptor, Buffer.from(text));
	} finally {
		closeSync(descriptor);
	}
}

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

/** Name of the process's user, or its number where it has no name, as in some containers. */
export function userName(): string {
	return process.env.USER ?? process.env.LOGNAME ?? `uid ${process.getuid?.()}`;
}
