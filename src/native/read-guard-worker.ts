/** The thread of ReadGuard: an entry point of its own. */
import { dlopen } from "bun:ffi";
import { writeSync } from "node:fs";
import { ReadObserver } from "../system/read-watch.ts";
import type { Guarded } from "./files.ts";

declare const self: Worker;

let looks: NodeJS.Timeout | null = null;

self.onmessage = ({ data }: MessageEvent<Guarded>) => {
	if (looks !== null) clearInterval(looks);
	if (data === null) return;
	const observer = new ReadObserver(data.watch, data.milliseconds);
	looks = setInterval(() => {
		const complaint = observer.complaint();
		if (complaint === null) return;
		writeSync(2, `mimo: ${complaint.message}\n`);
		// process.exit waits for the main thread, which waits in the kernel.
		dlopen("libc.so.6", { _exit: { args: ["i32"], returns: "void" } }).symbols._exit(complaint.exitCode);
	}, observer.interval);
};
