/**
 * Samples, as they pass through the loader. Names follow Energon's: `__key__` is key, `__restore_key__` is restoreKey,
 * …
 */

/**
 * Identifies a sample so that it can be read again: names and call numbers of wrappers from the outermost to the innermost, then
 * the sample index (docs/spec/energon.md §4.2).
 */
export type RestoreKey = readonly (string | number | RestoreKey)[];

/** The source of a sample. */
export interface SourceInfo {
	/** For names alone: a URL without its secrets. */
	readonly datasetPath: string;
	/** Sample index within the split part. */
	readonly index: number | string;
	readonly shardName: string;
	readonly fileNames: readonly string[];
}

export type Subflavors = Readonly<Record<string, unknown>>;

/** The undecoded bytes of a sample of one dataset. */
export interface RawSample {
	readonly key: string;
	readonly shard: string;
	readonly sources: readonly SourceInfo[];
	readonly parts: ReadonlyMap<string, Uint8Array>;
}

/**
 * Subflavors of a data set beneath those of a metadataset that names it, which win. The settings of `mimo` add up key by key:
 * a blend that sets one keeps those of the set.
 */
export function joinSubflavors(inner: Subflavors, outer: Subflavors): Subflavors {
	const joined = { ...inner, ...outer };
	const settings = [inner.mimo, outer.mimo];
	if (settings.some((own) => typeof own !== "object" || own === null || Array.isArray(own))) return joined;
	return { ...joined, mimo: Object.assign({}, ...settings) };
}

/** An output of the sample loader: a raw sample for each joined dataset. */
export interface RawRecord {
	readonly restoreKey: RestoreKey;
	readonly data: readonly (RawSample | null)[];
}

/** A typed or crude sample, an encoded sample, a pack or a batch: any element after the load step. */
export interface Sample {
	readonly key: string;
	restoreKey: RestoreKey;
	readonly sources: readonly SourceInfo[];
	readonly subflavors: Subflavors;
	/** "CrudeSample" or a sample type of format/dataset-config.ts. */
	readonly type: string;
	/** Decoded fields by name (typed), or decoded parts by extension (crude). */
	readonly fields: Readonly<Record<string, unknown>>;
}

/** Type of a sample whose field "tokens" holds the ids of a text, an Int32Array: its tokens, and behind them the last one's next. */
export const tokenSample = "TokenSample";

/** The fields of an element that wrappers use. */
export interface Keyed {
	restoreKey: RestoreKey;
}
