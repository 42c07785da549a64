/** Inputs of parsers that open a path. */
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { inputName } from "./parser.ts";

export class FileInput implements Disposable {
	readonly folder = mkdtempSync(join(tmpdir(), "fuzzed-"));
	readonly path: string;

	/** `suffix`: the end of the name that readers look for. */
	constructor(suffix = "") {
		this.path = join(this.folder, inputName + suffix);
	}

	/** The path of a file with these bytes. */
	with(bytes: Uint8Array): string {
		writeFileSync(this.path, bytes);
		return this.path;
	}

	[Symbol.dispose](): void {
		rmSync(this.folder, { recursive: true, force: true });
	}
}
