/** A file for each rank in the host's memory that lives as long as the launcher, whatever becomes of the rank's process. */
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
			this.#descriptors = Array.from({ length: ranks }, () => openSync(folder, constants.O_RDWR | unnamed, 0o600));
		} catch (error) {
			throw fileError("write", folder, error);
		}
	}

	/** The path by which processes of this host open a rank's file. */
	pathOf(rank: number): string {
		return `/proc/${process.pid}/fd/${this.#descriptors[rank]}`;
	}

	[Symbol.dispose](): void {
		for (const descriptor of this.#descriptors) closeSync(descriptor);
	}
}
