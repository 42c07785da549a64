/** Files of a data set in memory. */
import type { RandomAccessFile, Storage } from "../../src/data/energon/storage/storage.ts";
import { UserError } from "../../src/system/errors.ts";

export class MemoryStorage implements Storage {
	readonly files = new Map<string, Uint8Array>();

	open(path: string): RandomAccessFile {
		const bytes = this.#get(path);
		return {
			path,
			size: bytes.length,
			read: (offset, length) => bytes.subarray(offset, Math.min(bytes.length, offset + length)),
			close: () => {},
		};
	}

	readText(path: string): string {
		return new TextDecoder().decode(this.#get(path));
	}

	isFile(path: string): boolean {
		return this.files.has(path);
	}

	isFolder(path: string): boolean {
		return [...this.files.keys()].some((file) => file.startsWith(`${path}/`));
	}

	#get(path: string): Uint8Array {
		const bytes = this.files.get(path);
		if (bytes === undefined) throw new UserError(`${path} does not exist.`);
		return bytes;
	}
}
