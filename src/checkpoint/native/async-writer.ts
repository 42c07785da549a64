/**
 * Writes a rank's chunks on another thread while training goes on: the values are host snapshots in shared memory, which
 * the caller leaves alone until the report is there.
 */
import { UserError } from "../../native/errors.ts";
import { openWorker } from "../../native/worker.ts";
import type { Box } from "../chunks.ts";
import type { DtypeTag } from "../dtype.ts";
import type { ShardReport } from "./writer.ts";

/** A box of a tensor whose values stand in shared memory. */
export interface SnapshotEntry extends Box {
	readonly name: string;
	readonly dtype: DtypeTag;
	/** Of the whole tensor. */
	readonly shape: readonly number[];
	readonly memory: SharedArrayBuffer;
	/** Where in `memory` they begin. */
	readonly byteOffset: number;
}

export interface ShardJob {
	readonly folder: string;
	readonly rank: number;
	readonly entries: readonly SnapshotEntry[];
	readonly fileBytes?: number;
}

/** Answer of the thread: the report, or the sentence of the failure. */
export type ShardAnswer = { readonly report: ShardReport } | { readonly failure: string };

/** One thread that writes one job at a time. */
export class AsyncShardWriter implements Disposable {
	readonly #worker = openWorker("checkpoint/native/shard-worker");
	#busy = false;

	/** Starts a job; one at a time. */
	write(job: ShardJob): Promise<ShardReport> {
		if (this.#busy) throw new Error("The last checkpoint is still being written.");
		this.#busy = true;
		const { promise, resolve, reject } = Promise.withResolvers<ShardReport>();
		this.#worker.onmessage = ({ data }: MessageEvent<ShardAnswer>) => {
			this.#busy = false;
			if ("report" in data) resolve(data.report);
			else reject(new UserError(data.failure));
		};
		this.#worker.onerror = (event) => {
			this.#busy = false;
			reject(new Error(`The thread that writes checkpoints failed: ${event.message}`));
		};
		this.#worker.postMessage(job);
		return promise;
	}

	get busy(): boolean {
		return this.#busy;
	}

	[Symbol.dispose](): void {
		this.#worker.terminate();
	}
}
