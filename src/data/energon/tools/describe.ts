/** Describes a data set: kind, parts, shards, samples, types, and all data sets of a metadataset. */

import { unprepared } from "../errors.ts";
import { readDatasetConfig } from "../format/dataset-config.ts";
import { flatten, type Leaf } from "../format/flatten.ts";
import { IndexedReader } from "../format/indexed.ts";
import { joinedDatasets } from "../format/join-index.ts";
import { JsonlReader } from "../format/jsonl.ts";
import { readMetadataset } from "../format/metadataset.ts";
import { INDEX_SQLITE, META_FOLDER } from "../format/names.ts";
import { datasetKind, readShardCounts, readSplitPart, readSplits } from "../format/webdataset.ts";
import { subsetBounds } from "../sharder.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";

export interface PartDescription {
	readonly part: string;
	readonly shards: number;
	readonly samples: number;
	/** Number of excluded samples, which keep their index but are not delivered. */
	readonly excluded: number;
}

/** A data set that a metadataset reads for a part. */
export interface LeafDescription {
	readonly part: string;
	readonly path: string;
	readonly splitPart: string;
	readonly samples: number;
	/** Number of samples in the subset. */
	readonly used: number;
	readonly weight: number | null;
	readonly repetitions: number | null;
	readonly subflavors: Readonly<Record<string, unknown>>;
}

export interface DatasetDescription {
	readonly path: string;
	readonly kind: "webdataset" | "jsonl" | "indexed" | "metadataset";
	/** "crude", or the sample type's name. */
	readonly sampleType: string | null;
	readonly fields: Readonly<Record<string, string>>;
	readonly shards: number;
	readonly samples: number;
	readonly bytes: number;
	readonly hasKeyIndex: boolean;
	readonly parts: readonly PartDescription[];
	readonly leaves: readonly LeafDescription[];
}

const nothing = { sampleType: null, fields: {}, shards: 0, bytes: 0, hasKeyIndex: false, parts: [], leaves: [] };

/** Reads only metadata. Throws a UserError for anything that is not a prepared data set. */
export function describeDataset(storage: Storage, path: string): DatasetDescription {
	const kind = datasetKind(storage, path);
	switch (kind) {
		case "jsonl": {
			const samples = new JsonlReader(storage, path).length;
			return { ...nothing, path, kind, sampleType: "crude", shards: 1, samples, bytes: sizeOf(storage, path) };
		}
		case "indexed": {
			const samples = new IndexedReader(path, null).length;
			return { ...nothing, path, kind, sampleType: "tokens", shards: 1, samples, bytes: sizeOf(storage, path) };
		}
		case "metadataset": {
			const leaves = describeLeaves(storage, path);
			const samples = leaves.reduce((sum, { used }) => sum + used, 0);
			return { ...nothing, path, kind, samples, leaves };
		}
		case "webdataset":
			return describeFolder(storage, path);
		default:
			throw unprepared(path);
	}
}

function describeFolder(storage: Storage, path: string): DatasetDescription {
	const counts = readShardCounts(storage, path);
	const config = readDatasetConfig(storage, path, null);
	const { splits } = readSplits(storage, path, null);
	const parts = [...splits.parts.keys()].map((part): PartDescription => {
		if (splits.parts.get(part)!.length === 0) return { part, shards: 0, samples: 0, excluded: 0 };
		const { shards, excludes } = readSplitPart(storage, path, part, null);
		const names = new Set(shards.map(({ name }) => name));
		const excluded = [...excludes].filter((name) => [...names].some((shard) => name.startsWith(`${shard}/`))).length;
		return { part, shards: shards.length, samples: shards.reduce((sum, { count }) => sum + count, 0), excluded };
	});
	const fields = [...config.fields].map(([field, access]) => [field, access.map((one) => one.join(".")).join(",")]);
	return {
		...nothing,
		path,
		kind: "webdataset",
		sampleType: config.sampleType?.name ?? "crude",
		fields: Object.fromEntries(fields),
		shards: counts.size,
		samples: [...counts.values()].reduce((sum, count) => sum + count, 0),
		bytes: [...counts.keys()].reduce((sum, name) => sum + sizeOf(storage, resolvePath(path, name)), 0),
		hasKeyIndex: storage.isFile(resolvePath(path, `${META_FOLDER}/${INDEX_SQLITE}`)),
		parts,
	};
}

function describeLeaves(storage: Storage, path: string): LeafDescription[] {
	const metadataset = readMetadataset(storage, path);
	return [...metadataset.splits.keys()].flatMap((part) => {
		const inherited = { splitPart: part, subflavors: {}, multiplier: 1, subset: null };
		return flatten(metadataset, inherited).leaves.map((leaf): LeafDescription => {
			const { splitPart, subset, weight, repetitions, subflavors } = leaf;
			const samples = samplesOf(storage, leaf);
			const [start, end] = subsetBounds(samples, subset);
			const name = leaf.source.kind === "dataset" ? leaf.source.path : `join in ${leaf.source.join.file}`;
			return { part, path: name, splitPart, samples, used: end - start, weight, repetitions, subflavors };
		});
	});
}

function samplesOf(storage: Storage, { source, splitPart }: Leaf): number {
	const sum = (shards: readonly { readonly count: number }[]) => shards.reduce((total, { count }) => total + count, 0);
	if (source.kind === "join") return sum(joinedDatasets(storage, source.join, splitPart)[0]!.part.shards);
	const kind = datasetKind(storage, source.path);
	if (kind === "jsonl") return new JsonlReader(storage, source.path).length;
	if (kind === "indexed") return new IndexedReader(source.path, null).length;
	return sum(readSplitPart(storage, source.path, splitPart, source.splitConfig).shards);
}

/** Size of a file; 0 for a missing file, which `mimo data lint` reports. */
function sizeOf(storage: Storage, path: string): number {
	if (!storage.isFile(path)) return 0;
	const file = storage.open(path);
	try {
		return file.size;
	} finally {
		file.close();
	}
}
