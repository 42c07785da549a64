/**
 * Brings the written part of a large file to the disk while the rest is written: one fsync after the other on a thread
 * of its own. The writer's last fsync then has little to wait for.
 */
import { openWorker } from "../system/worker.ts";

/** A message to the thread: its file, and a word in shared memory with its command. */
export interface WriteBackJob {
	readonly fd: number;
	readonly state: SharedArrayBuffer;
}

export const WriteBackState = { idle: 0, asked: 1, syncing: 2, failed: 3, over: 4 } as const;

/** For both sides: waits while the word is `state`; returns its next value. */
export function waitWhile(word: Int32Array, state: number): number {
	for (;;) {
		const now = Atomics.load(word, 0);
		if (now !== state) return now;
		Atomics.wait(word, 0, now, 1000);
	}
}

export class WriteBack {
	readonly #worker = openWorker("checkpoint/write-back-worker");
	readonly #word: Int32Array;

	constructor(fd: number) {
		const state = new SharedArrayBuffer(4);
		this.#word = new Int32Array(state);
		this.#worker.postMessage({ fd, state } satisfies WriteBackJob);
	}

	/** Asks for an fsync unless one is under way. */
	ask(): void {
		this.#change(WriteBackState.idle, WriteBackState.asked);
	}

	/** Waits for the fsync under way and ends the thread. Whether all have succeeded: a failure is reported only once. */
	end(): boolean {
		// A command that the thread has not begun is left to the caller.
		this.#change(WriteBackState.asked, WriteBackState.over);
		const state = waitWhile(this.#word, WriteBackState.syncing);
		this.#change(state, WriteBackState.over);
		return state !== WriteBackState.failed;
	}

	#change(from: number, to: number): void {
		if (Atomics.compareExchange(this.#word, 0, from, to) === from) Atomics.notify(this.#word, 0);
	}
}
