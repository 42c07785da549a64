/** Appends whole records to files. */
import { closeSync, fstatSync, ftruncateSync, openSync, writeSync } from "node:fs";

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
