/** The thread of SaveThread: an entry point of its own. */
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { type Library, openLibrary } from "../../native/library.ts";
import { UserError } from "../../system/errors.ts";
import { fileError } from "../../system/system-errors.ts";
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
import { iterationName, NativeSave, type ShardReport, writeShard } from "./writer.ts";
import { lockLost } from "./writer-lock.ts";

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

// The two jobs of a save: every rank writes, then rank 0 publishes. Ranks report through files of the save's folder.

/** Runs a job. `library` hashes the written bytes. */
function runSaveJob(job: SaveJob, library: Library): void {
	if (job.kind === "write") write(job, library);
	else publish(job);
}

const reportsName = "reports";

function reportPath(folder: string, rank: number): string {
	return join(folder, reportsName, `r${String(rank).padStart(5, "0")}.json`);
}

function write({ folder, rank, entries, fileBytes }: WriteJob, library: Library): void {
	const boxes = entries.map(({ memory, byteOffset, ...entry }) => ({
		...entry,
		data: () => new Uint8Array(memory, byteOffset, bytesOfType({ dtype: entry.dtype, shape: entry.sizes })),
	}));
	const report = writeShard(folder, rank, boxes, { library, ...(fileBytes ? { fileBytes } : {}) });
	const path = reportPath(folder, rank);
	try {
		mkdirSync(join(folder, reportsName), { recursive: true });
		writeFileSync(path, JSON.stringify(report));
	} catch (error) {
		throw fileError("write", path, error);
	}
}

function publish({ root, folder, iteration, ranks, description, retention, lock }: PublishJob): void {
	const reports = Array.from({ length: ranks }, (_, rank): ShardReport => {
		const path = reportPath(folder, rank);
		try {
			return JSON.parse(readFileSync(path, "utf8"));
		} catch (error) {
			throw fileError("read", path, error);
		}
	});
	const lost = lock === null ? null : lockLost(lock);
	if (lost !== null) throw new UserError(lost);
	const { own = null } = retention;
	const name = iterationName(iteration);
	if (own !== null && !own.includes(name) && existsSync(join(root, name, indexName))) {
		throw new UserError(`${join(root, name)} was put there while this run trained; --save-over replaces it.`);
	}
	rmSync(join(folder, reportsName), { recursive: true });
	new NativeSave(root, iteration, folder).publish(reports, description);
	applyRetention(root, { ...retention, own: own === null ? null : [...own, name] });
}
