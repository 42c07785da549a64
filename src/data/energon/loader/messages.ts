/** Messages between the loader and its threads. */
import type { StorageConfiguration } from "../storage/open.ts";
import type { LoaderConfiguration } from "./configuration.ts";

/** The report of a skipped sample. */
export interface SkippedSample {
	readonly rank: number;
	/** null: all workers of the rank. */
	readonly worker: number | null;
	/** The failure, as a sentence. */
	readonly reason: string;
	/** Whether a setting leaves such samples out, so that they do not count as damaged. */
	readonly expected: boolean;
	/** Shard and key of every lost sample; empty if the failing step had no sample. */
	readonly samples: readonly { readonly dataset: string; readonly shard: string; readonly key: string }[];
}

/** A logical worker of a data rank, and the encoded position at which it starts. */
export interface OpenedWorker {
	/** Number among all workers of the loader. */
	readonly number: number;
	readonly rank: number;
	/** Number among the workers of the data rank. */
	readonly id: number;
	readonly position: unknown | null;
	/** Number of outputs to discard at the start. */
	readonly skip: number;
}

export type ToThread =
	| {
			readonly type: "open";
			readonly configuration: LoaderConfiguration;
			readonly storage: StorageConfiguration;
			/** Shows which local file the thread reads. */
			readonly watch: SharedArrayBuffer;
			/** Logical workers that the thread runs. */
			readonly workers: readonly OpenedWorker[];
			readonly onFailure: "skip" | "raise";
			/** Most bytes of images that the process decodes at the same time. */
			readonly decodingBytes: number;
			/** Settings of the state to continue from; null = from the beginning. */
			readonly saved: Readonly<Record<string, string>> | null;
	  }
	/** Requests the next event of a worker. Positions before event `needed` may be dropped. */
	| { readonly type: "pull"; readonly worker: number; readonly needed: number }
	/** Requests the position before an event. */
	| { readonly type: "position"; readonly worker: number; readonly event: number; readonly request: number };

export type FromThread =
	| {
			readonly type: "opened";
			readonly settings: Readonly<Record<string, string>>;
			readonly length: number;
	  }
	/** `item` null: the end of a pass. `bytes`: memory of the item. */
	| { readonly type: "event"; readonly worker: number; readonly item: unknown; readonly bytes: number }
	| { readonly type: "position"; readonly request: number; readonly position: unknown }
	| { readonly type: "skipped"; readonly skipped: SkippedSample }
	/** About a sample that is used nevertheless. */
	| { readonly type: "remark"; readonly sentence: string }
	| { readonly type: "failed"; readonly sentence: string; readonly isUserError: boolean; readonly stack: string };
