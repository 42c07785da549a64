/** Messages between the loader and its threads. */
import type { StorageConfiguration } from "../storage/open.ts";
import type { LoaderConfiguration } from "./configuration.ts";

/** A sample that was left out, as it is reported. */
export interface SkippedSample {
	readonly rank: number;
	/** null: of all workers of the rank. */
	readonly worker: number | null;
	/** The failure, in one sentence. */
	readonly reason: string;
	/** A setting leaves such samples out: they do not count as damage. */
	readonly expected: boolean;
	/** Shard and key of every sample that was lost; empty when the failing step was given none. */
	readonly samples: readonly { readonly dataset: string; readonly shard: string; readonly key: string }[];
}

/** A logical worker of a data rank, and where it starts (an encoded position). */
export interface OpenedWorker {
	/** Its number among all workers of the loader. */
	readonly number: number;
	readonly rank: number;
	/** Its number among those of the data rank. */
	readonly id: number;
	readonly position: unknown | null;
	/** Outputs to make for nothing first. */
	readonly skip: number;
}

export type ToThread =
	| {
			readonly type: "open";
			readonly configuration: LoaderConfiguration;
			readonly storage: StorageConfiguration;
			/** Logical workers this thread runs. */
			readonly workers: readonly OpenedWorker[];
			readonly onFailure: "skip" | "raise";
			/** Settings of the state to continue from; null = from the beginning. */
			readonly saved: Readonly<Record<string, string>> | null;
	  }
	/** Make the next event of a worker. Positions before event `needed` may be forgotten. */
	| { readonly type: "pull"; readonly worker: number; readonly needed: number }
	/** Tell the position before an event. */
	| { readonly type: "position"; readonly worker: number; readonly event: number; readonly request: number };

export type FromThread =
	| {
			readonly type: "opened";
			readonly settings: Readonly<Record<string, string>>;
			readonly length: number;
	  }
	/** `item` null: the end of a pass. `bytes`: memory the item takes. */
	| { readonly type: "event"; readonly worker: number; readonly item: unknown; readonly bytes: number }
	| { readonly type: "position"; readonly request: number; readonly position: unknown }
	| { readonly type: "skipped"; readonly skipped: SkippedSample }
	| { readonly type: "failed"; readonly sentence: string; readonly isUserError: boolean; readonly stack: string };
