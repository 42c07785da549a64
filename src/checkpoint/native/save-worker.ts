/** The thread of SaveThread: an entry point of its own. */

import { runSaveJob } from "./save-jobs.ts";
import { type SaveMessage, setState } from "./save-thread.ts";

declare const self: Worker;

self.onmessage = async ({ data: { job, status } }: MessageEvent<SaveMessage>) => {
	setState(status, "running");
	try {
		await runSaveJob(job);
		setState(status, "done");
	} catch (error) {
		setState(status, "failed", (error as Error).message);
	}
};
