/**
 * Reads of files that do not return, as on a file system whose server is gone. The reading thread then waits in the kernel, where
 * no timer of its own runs: it shows in shared memory which file it reads, and another thread sees how long that lasts.
 */
import { UserError } from "./errors.ts";

/** After the number of the reads' beginnings and ends, odd during a read, and the length of the path. */
const PATH = 8;
const LONGEST_PATH = 4096;

/** Where the reads of this thread are shown; null: nowhere. */
let shown: SharedArrayBuffer | null = null;

/** Shared memory that shows the reads of a thread. */
export function newReadWatch(): SharedArrayBuffer {
	return new SharedArrayBuffer(PATH + LONGEST_PATH);
}

/** From now on the reads of this thread are shown in `watch`; null: no longer. */
export function showReads(watch: SharedArrayBuffer | null): void {
	shown = watch;
}

/** Runs `read`, which reads the file `path`, and shows it while it lasts; a read within another one belongs to that. */
export function watched<Result>(path: string, read: () => Result): Result {
	if (shown === null) return read();
	const words = new Int32Array(shown, 0, 2);
	if (words[0]! % 2 !== 0) return read();
	words[1] = new TextEncoder().encodeInto(path, new Uint8Array(shown, PATH)).written;
	Atomics.add(words, 0, 1);
	try {
		return read();
	} finally {
		Atomics.add(words, 0, 1);
	}
}

/** Looks at the reads of another thread from time to time. */
export class ReadObserver {
	#count = 0;
	#since = performance.now();

	/** `milliseconds`: the longest that a read may last. */
	constructor(
		private readonly watch: SharedArrayBuffer,
		private readonly milliseconds: number,
	) {}

	/** The sentence about a read that has lasted too long; null: there is none. */
	complaint(): UserError | null {
		const words = new Int32Array(this.watch, 0, 2);
		const count = Atomics.load(words, 0);
		if (count !== this.#count || count % 2 === 0) {
			[this.#count, this.#since] = [count, performance.now()];
			return null;
		}
		if (performance.now() - this.#since < this.milliseconds) return null;
		const path = new TextDecoder().decode(new Uint8Array(this.watch, PATH, words[1]).slice());
		return new UserError(
			`data-timeout ${this.milliseconds / 1000}: ${path} cannot be read, its file system gives no answer.`,
		);
	}

	/** Milliseconds after which to look again. */
	get interval(): number {
		return Math.min(1000, this.milliseconds / 4);
	}
}
