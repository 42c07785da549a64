/**
 * Writes checkpoints on another thread while training goes on. The thread is looked at, not listened to: a training loop
 * that never returns to the event loop still learns how far it is.
 */

import { existsSync, rmSync } from "node:fs";
import { join } from "node:path";
import { openWorker } from "../../system/worker.ts";
import type { CheckpointStore, StoreReference } from "../remote/checkpoint-store.ts";
import { indexName } from "./manifest.ts";
import { latestIteration, listIterations } from "./reader.ts";
import type { CheckpointDescription, ShardEntry } from "./writer.ts";
import type { LockReference } from "./writer-lock.ts";

/** A box of a tensor whose values stand in shared memory, which stays unchanged until the job is done. */
export interface SnapshotEntry extends Omit<ShardEntry, "data"> {
	readonly memory: SharedArrayBuffer;
	/** Offset of the values in `memory`, in bytes. */
	readonly byteOffset: number;
}

/** Writes a rank's boxes and its report into the folder of a save. */
export interface WriteJob {
	readonly kind: "write";
	readonly store: StoreReference;
	/** On this host. */
	readonly folder: string;
	readonly iteration: number;
	readonly rank: number;
	readonly entries: readonly SnapshotEntry[];
	readonly fileBytes?: number;
}

/** Makes a checkpoint of the files that all ranks have written, and deletes checkpoints that are not to be kept. */
export interface PublishJob {
	readonly kind: "publish";
	readonly store: StoreReference;
	readonly folder: string;
	readonly iteration: number;
	readonly ranks: number;
	readonly description: Omit<CheckpointDescription, "iteration">;
	readonly retention: Retention;
	/** The right to write, which another run may have taken meanwhile; null: the folder has no lock. */
	readonly lock: LockReference | null;
}

export type SaveJob = WriteJob | PublishJob;

/** A message to the thread. */
export interface SaveMessage {
	readonly job: SaveJob;
	readonly status: SharedArrayBuffer;
}

/** Values of a status word; after it come the length of the failure's sentence and the sentence. */
const SaveState = { posted: 0, running: 1, done: 2, failed: 3 } as const;
const longestSentence = 4096;
const headBytes = 8;

/** Milliseconds for the thread to begin. */
const longestStart = 120_000;

export interface SaveResult {
	/** The sentence of the failure, or null. */
	readonly failure: string | null;
}

/** The thread that writes checkpoints, one job at a time. */
export class SaveThread implements Disposable {
	readonly #worker = openWorker("checkpoint/native/save-worker");
	#status: SharedArrayBuffer | null = null;
	#posted = 0;

	/** Starts a job; the one before must have been looked at until its result was there. */
	start(job: SaveJob): void {
		if (this.#status !== null) throw new Error("The thread that writes checkpoints is busy.");
		this.#status = new SharedArrayBuffer(headBytes + longestSentence);
		this.#posted = performance.now();
		this.#worker.postMessage({ job, status: this.#status } satisfies SaveMessage);
	}

	get busy(): boolean {
		return this.#status !== null;
	}

	/** The job's result, once; null while it is under way. */
	poll(): SaveResult | null {
		if (this.#status === null) throw new Error("The thread that writes checkpoints has nothing to do.");
		const words = new Int32Array(this.#status, 0, 2);
		const state = Atomics.load(words, 0);
		if (state === SaveState.posted || state === SaveState.running) return null;
		const sentence = readSentence(this.#status);
		this.#status = null;
		return { failure: state === SaveState.failed ? sentence : null };
	}

	/** Blocks until the result is there, or (null) for `milliseconds`. */
	wait(milliseconds = Number.POSITIVE_INFINITY): SaveResult | null {
		const started = performance.now();
		for (;;) {
			const result = this.poll();
			const waited = performance.now() - started;
			if (result !== null || waited >= milliseconds) return result;
			const words = new Int32Array(this.#status!, 0, 1);
			const state = Atomics.load(words, 0);
			if (state === SaveState.posted && performance.now() - this.#posted > longestStart) {
				throw new Error("The thread that writes checkpoints did not start.");
			}
			Atomics.wait(words, 0, state, Math.min(1000, milliseconds - waited));
		}
	}

	[Symbol.dispose](): void {
		this.#worker.terminate();
	}
}

function readSentence(status: SharedArrayBuffer): string {
	const length = new Int32Array(status, 4, 1)[0]!;
	return new TextDecoder().decode(new Uint8Array(status, headBytes, length).slice());
}

/** For the thread: says how far its job is. */
export function setState(status: SharedArrayBuffer, state: keyof typeof SaveState, sentence = ""): void {
	const words = new Int32Array(status, 0, 2);
	const bytes = new TextEncoder().encode(sentence).subarray(0, longestSentence);
	new Uint8Array(status, headBytes).set(bytes);
	words[1] = bytes.length;
	Atomics.store(words, 0, SaveState[state]);
	Atomics.notify(words, 0);
}

// Deletes old checkpoints after a save (docs/spec/runtime.md §10).

export interface Retention {
	/** Keep this many of the newest; unset: all. */
	readonly keep?: number | null;
	/** Keep those of iterations divisible by this, whatever `keep` says. With it alone, only those and the newest stay. */
	readonly retainInterval?: number | null;
	/** Folders' names of the only ones that may go: those that the run goes on from or has written. null: any. */
	readonly own?: readonly string[] | null;
}

/**
 * Deletes the checkpoints that the policy does not keep, never the one that `latest` names. The index is deleted first,
 * so that a half-deleted checkpoint is not taken for a whole one. Returns the deleted folders' names.
 */
export async function applyRetention(
	store: Pick<CheckpointStore, "folder" | "remove">,
	{ keep, retainInterval, own = null }: Retention,
): Promise<string[]> {
	if (!keep && !retainInterval) return [];
	const root = store.folder;
	const latest = latestIteration(root);
	const iterations = listIterations(root).filter((name) => name !== "release" && (own === null || own.includes(name)));
	const newest = new Set(iterations.slice(-(keep || 1)));
	const deleted = iterations.filter((name) => {
		const iteration = Number(name.slice("iter_".length));
		const retained = retainInterval ? iteration % retainInterval === 0 : false;
		return !newest.has(name) && !retained && iteration !== latest;
	});
	for (const name of deleted) {
		await store.remove(name);
		const index = join(root, name, indexName);
		if (existsSync(index)) rmSync(index);
		rmSync(join(root, name), { recursive: true, force: true });
	}
	return deleted;
}
