/** Writes text to standard output synchronously, with errors; `console.log` ignores that a disk is full. */
import { writeSync } from "node:fs";
import { exitCodes } from "../system/exit-codes.ts";
import { fileError } from "../system/system-errors.ts";

/** Writes `text` to standard output. Throws a UserError if the system refuses it; ends the process if the reader has closed the pipe. */
export function writeOut(text: string): void {
	const bytes = Buffer.from(text);
	for (let written = 0; written < bytes.length; ) {
		try {
			written += writeSync(1, bytes, written);
		} catch (error) {
			const { code } = error as NodeJS.ErrnoException;
			if (code === "EPIPE") process.exit(exitCodes.unread);
			if (code !== "EAGAIN") throw fileError("write", "standard output", error);
			Bun.sleepSync(1);
		}
	}
}

/** Writes `text` as a line, or lines, to standard output; errors as of `writeOut`. */
export function print(text: string): void {
	writeOut(`${text}\n`);
}

/** The lines of a table, with columns as wide as their widest cell. */
export function columns(rows: readonly (readonly string[])[]): string[] {
	const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
	return rows.map((row) =>
		row
			.map((cell, column) => cell.padEnd(widths[column]!))
			.join("  ")
			.trimEnd(),
	);
}

/** "20.3 GiB", "512 KiB". */
export function bytesText(bytes: number): string {
	const units = ["B", "KiB", "MiB", "GiB", "TiB"];
	const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
	return `${(bytes / 1024 ** power).toFixed(power < 2 ? 0 : 1)} ${units[power]}`;
}
