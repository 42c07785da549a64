/** The thread of WriteBack: an entry point of its own. It ends before its file is closed, or by a failure. */
import { fsyncSync } from "node:fs";
import { type WriteBackJob, WriteBackState, waitWhile } from "./files.ts";

declare const self: Worker;

self.onmessage = ({ data: { fd, state } }: MessageEvent<WriteBackJob>) => {
	const word = new Int32Array(state);
	const { idle, asked, syncing } = WriteBackState;
	while (waitWhile(word, idle) === asked && Atomics.compareExchange(word, 0, asked, syncing) === asked) {
		let next: number = idle;
		try {
			fsyncSync(fd);
		} catch {
			next = WriteBackState.failed;
		}
		Atomics.store(word, 0, next);
		Atomics.notify(word, 0);
	}
	process.exit();
};
