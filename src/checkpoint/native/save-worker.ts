/** The thread of SaveThread: an entry point of its own. */
import { existsSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import { type Library, openLibrary } from "../../native/library.ts";
import { UserError } from "../../system/errors.ts";
import { storeOf } from "../remote/checkpoint-store.ts";
import { bytesOfType } from "../store.ts";
import { indexName } from "./manifest.ts";
import {
	applyRetention,
	type PublishJob,
	type SaveJob,
	type SaveMessage,
	setState,
	type WriteJob,
} from "./save-thread.ts";
import { iterationName, NativeSave, writeShard } from "./writer.ts";
import { lockLost } from "./writer-lock.ts";

declare const self: Worker;

/** For all jobs of the thread. */
const library = openLibrary("cpu");

self.onmessage = async ({ data: { job, status } }: MessageEvent<SaveMessage>) => {
	setState(status, "running");
	try {
		await runSaveJob(job, await library);
		setState(status, "done");
	} catch (error) {
		setState(status, "failed", (error as Error).message);
	}
};

// The two jobs of a save: every rank writes, then rank 0 publishes. Ranks report by way of the store.

/** Runs a job. `library` hashes the written bytes. */
async function runSaveJob(job: SaveJob, library: Library): Promise<void> {
	if (job.kind === "write") await write(job, library);
	else await publish(job);
}

async function write({ store: reference, folder, iteration, rank, entries, fileBytes }: WriteJob, library: Library) {
	const store = storeOf(reference);
	const save = { folder, name: iterationName(iteration) };
	const boxes = entries.map(({ memory, byteOffset, ...entry }) => ({
		...entry,
		data: () => new Uint8Array(memory, byteOffset, bytesOfType({ dtype: entry.dtype, shape: entry.sizes })),
	}));
	// A host that shares no disk with rank 0's has no such folder yet.
	if (store.staged) mkdirSync(join(folder, "data"), { recursive: true });
	const suffix = store.suffix(save);
	const report = writeShard(folder, rank, boxes, { library, suffix, ...(fileBytes ? { fileBytes } : {}) });
	await store.deliver(save, rank, report);
}

async function publish({ store: reference, folder, iteration, ranks, description, retention, lock }: PublishJob) {
	const store = storeOf(reference);
	const name = iterationName(iteration);
	const save = { folder, name };
	const root = store.folder;
	const reports = await store.collect(save, ranks);
	const lost = lock === null ? null : lockLost(lock);
	if (lost !== null) throw new UserError(lost);
	const { own = null } = retention;
	if (own !== null && !own.includes(name) && existsSync(join(root, name, indexName))) {
		throw new UserError(`${join(root, name)} was put there while this run trained; --save-over replaces it.`);
	}
	await new NativeSave(root, iteration, folder).publish(reports, description, {
		suffix: store.suffix(save),
		commit: async (latest) => await store.commit(save, latest, { foreign: own === null }),
	});
	await applyRetention(store, { ...retention, own: own === null ? null : [...own, name] });
}
