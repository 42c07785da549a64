/** Two files for each rank in the host's memory that live as long as the launcher, whatever becomes of the rank's process. */
import { closeSync, constants, openSync } from "node:fs";
import { fileError } from "../system/system-errors.ts";

const folder = "/dev/shm";
/** O_TMPFILE of x86-64: a file without a name, which the system removes with its last user. */
const unnamed = 0o20200000;

export class RankMemory implements Disposable {
	readonly #descriptors: readonly number[];

	/** Throws a UserError if the host's memory has no files. */
	constructor(ranks: number) {
		try {
			this.#descriptors = Array.from({ length: 2 * ranks }, () => openSync(folder, constants.O_RDWR | unnamed, 0o600));
		} catch (error) {
			throw fileError("write", folder, error);
		}
	}

	/** The paths by which processes of this host open a rank's files: of its own state, and of another rank's. */
	pathsOf(rank: number): { readonly memory: string; readonly replica: string } {
		const path = (file: number) => `/proc/${process.pid}/fd/${this.#descriptors[2 * rank + file]}`;
		return { memory: path(0), replica: path(1) };
	}

	[Symbol.dispose](): void {
		for (const descriptor of this.#descriptors) closeSync(descriptor);
	}
}
