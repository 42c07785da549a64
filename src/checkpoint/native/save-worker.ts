/** The thread of SaveThread: an entry point of its own. */
import { openLibrary } from "../../native/library.ts";
import { runSaveJob } from "./save-jobs.ts";
import { type SaveMessage, setState } from "./save-thread.ts";

declare const self: Worker;

/** For all jobs of the thread. */
const library = openLibrary("cpu");

self.onmessage = async ({ data: { job, status } }: MessageEvent<SaveMessage>) => {
	setState(status, "running");
	try {
		runSaveJob(job, await library);
		setState(status, "done");
	} catch (error) {
		setState(status, "failed", (error as Error).message);
	}
};
