/** The thread that keeps a WriterLock alive: an entry point of its own, so that computing for minutes does not stop it. */
import { beatLock, type HeartbeatMessage } from "./writer-lock.ts";

declare const self: Worker;

self.onmessage = ({ data: { beat, ...lock } }: MessageEvent<HeartbeatMessage>) => {
	let count = 0;
	const timer = setInterval(() => {
		count++;
		if (!beatLock(lock, count)) clearInterval(timer);
	}, beat);
};
