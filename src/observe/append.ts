/** Appending to the files of a run's record. */
import { closeSync, fstatSync, ftruncateSync, openSync, writeSync } from "node:fs";

/**
 * Appends all of `bytes` to a file that is open for appending, or none of them, so that what is appended later follows a
 * whole record. Throws where the disk takes only a part, and where the file is removed: its bytes would go nowhere.
 */
export function appendWhole(descriptor: number, bytes: Uint8Array): void {
	const before = fstatSync(descriptor);
	if (before.isFile() && before.nlink === 0) throw new Error("it was removed");
	if (writeSync(descriptor, bytes) === bytes.length) return;
	if (before.isFile()) ftruncateSync(descriptor, before.size);
	throw new Error("the disk is full");
}

/** Appends a text to the file of this name, which is made where it is missing, in the same way. */
export function appendText(file: string, text: string): void {
	const descriptor = openSync(file, "a");
	try {
		appendWhole(descriptor, Buffer.from(text));
	} finally {
		closeSync(descriptor);
	}
}
