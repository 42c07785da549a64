/**
 * Samples, as they pass through the loader. Names follow Energon's: `__key__` is key, `__restore_key__` is restoreKey,
 * …
 */

/**
 * Finds a sample again: wrapper names and call numbers from outside in, the sample index last
 * (docs/spec/energon.md §4.2).
 */
export type RestoreKey = readonly (string | number | RestoreKey)[];

/** Where a sample was read. */
export interface SourceInfo {
	readonly datasetPath: string;
	/** Sample index within the split part. */
	readonly index: number | string;
	readonly shardName: string;
	readonly fileNames: readonly string[];
}

export type Subflavors = Readonly<Record<string, unknown>>;

/** The bytes of one sample as they are in the shard; joined datasets have several, some perhaps missing. */
export interface RawSample {
	readonly key: string;
	readonly shard: string;
	readonly sources: readonly SourceInfo[];
	readonly parts: ReadonlyMap<string, Uint8Array>;
}

/** An output of the sample loader: one raw sample per joined dataset. */
export interface RawRecord {
	readonly restoreKey: RestoreKey;
	readonly data: readonly (RawSample | null)[];
}

/** Anything behind the load step: a typed or crude sample, an encoded one, a pack or a batch. */
export interface Sample {
	readonly key: string;
	restoreKey: RestoreKey;
	readonly sources: readonly SourceInfo[];
	readonly subflavors: Subflavors;
	/** "CrudeSample" or a sample type of sample-types.ts. */
	readonly type: string;
	/** Decoded fields by name (typed), or decoded parts by extension (crude). */
	readonly fields: Readonly<Record<string, unknown>>;
}

/** The fields of an element that wrappers need. */
export interface Keyed {
	restoreKey: RestoreKey;
}
