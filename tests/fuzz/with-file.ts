/** Bytes that a writer of files writes. */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { OutputFile } from "../../src/checkpoint/files.ts";

/** Gives `fill` a new folder and returns the bytes of the file in it that it names. */
export function withFolder(fill: (folder: string) => string): Uint8Array {
	const folder = mkdtempSync(join(tmpdir(), "mimo-fuzz-seed-"));
	try {
		return readFileSync(join(folder, fill(folder)));
	} finally {
		rmSync(folder, { recursive: true });
	}
}

export function withFile(fill: (file: OutputFile) => void): Uint8Array {
	return withFolder((folder) => {
		using file = new OutputFile(join(folder, "file"), { sync: false });
		fill(file);
		file.close();
		return "file";
	});
}
