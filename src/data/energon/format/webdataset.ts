/** Reads the `.nv-meta` folder of a prepared WebDataset: its shards and split parts. */
import { UserError } from "../../../system/errors.ts";
import { resolvePath, type Storage } from "../storage/storage.ts";
import { expandBraces } from "./brace.ts";
import { INDEX_SQLITE, INFO_JSON, INFO_YAML, META_FOLDER } from "./names.ts";
import { parseYaml, YamlFields, type YamlMap, type YamlValue } from "./yaml.ts";

export interface Shard {
	/** Relative path, by which the split and the index name the shard. */
	readonly name: string;
	readonly path: string;
	/** Number of samples. */
	readonly count: number;
}

export interface SplitPart {
	/** Shards to read, in order. */
	readonly shards: readonly Shard[];
	/** Excluded samples, as "shard/key". */
	readonly excludes: ReadonlySet<string>;
	/** All shards of the part, with excluded ones; a join index counts them. */
	readonly allShards: readonly string[];
}

export type DatasetKind = "webdataset" | "jsonl" | "metadataset" | "filesystem" | "invalid";

/** The kind of data set at a path (docs/spec/energon.md §1.1). */
export function datasetKind(storage: Storage, path: string): DatasetKind {
	if (path.endsWith(".jsonl") || path.endsWith(".yaml")) {
		if (storage.isFile(path)) return path.endsWith(".jsonl") ? "jsonl" : "metadataset";
	}
	const meta = (file: string) => storage.isFile(resolvePath(path, `${META_FOLDER}/${file}`));
	if (meta(INFO_JSON) || meta(INFO_YAML)) return "webdataset";
	return meta(INDEX_SQLITE) ? "filesystem" : "invalid";
}

/** Parses a `.yaml` or `.json` file of the metadata folder into a map. */
export function readMap(storage: Storage, path: string): YamlMap {
	const text = storage.readText(path);
	const value = path.endsWith(".json") ? parseJson(text, path) : parseYaml(text, path);
	if (!(value instanceof Map)) throw new UserError(`${path} is not a map.`);
	return value;
}

/** Parses JSON into the maps and lists of parsed YAML. */
function parseJson(text: string, name: string): YamlValue {
	let value: unknown;
	try {
		value = JSON.parse(text);
	} catch (error) {
		throw new UserError(`${name} is not JSON: ${(error as Error).message}.`);
	}
	const convert = (item: unknown): YamlValue => {
		if (Array.isArray(item)) return item.map(convert);
		if (item !== null && typeof item === "object") {
			return new Map(Object.entries(item).map(([key, inner]) => [key, convert(inner)]));
		}
		return item as YamlValue;
	};
	return convert(value);
}

/** Number of samples by shard, in the order of `.info.json`; the position is the shard's number in the indexes. */
export function readShardCounts(storage: Storage, folder: string): Map<string, number> {
	const json = resolvePath(folder, `${META_FOLDER}/${INFO_JSON}`);
	const path = storage.isFile(json) ? json : resolvePath(folder, `${META_FOLDER}/${INFO_YAML}`);
	const fields = YamlFields.of(readMap(storage, path), path);
	fields.get("energon_version");
	const counts = fields.optionalMap("shard_counts");
	if (counts === null) throw new UserError(`${path} has no shard_counts.`);
	fields.end();
	for (const [shard, count] of counts) {
		if (typeof count !== "number" || !Number.isSafeInteger(count) || count < 0) {
			throw new UserError(`${path}: the sample count of ${shard} is ${JSON.stringify(count)}.`);
		}
	}
	return counts as Map<string, number>;
}

export interface Splits {
	readonly parts: ReadonlyMap<string, readonly string[]>;
	readonly exclude: readonly string[];
}

/** Reads the split file; without a name `split.yaml`, else `split.json`. */
export function readSplits(storage: Storage, folder: string, name: string | null): { splits: Splits; path: string } {
	let path = resolvePath(folder, `${META_FOLDER}/${name ?? "split.yaml"}`);
	const fallback = resolvePath(folder, `${META_FOLDER}/split.json`);
	if ((name ?? "split.yaml") === "split.yaml" && !storage.isFile(path) && storage.isFile(fallback)) path = fallback;
	const fields = YamlFields.of(readMap(storage, path), path);
	const partFields = fields.optionalMap("split_parts");
	if (partFields === null) throw new UserError(`${path} has no split_parts.`);
	const parts = new YamlFields(partFields, `split_parts of ${path}`);
	const splits: Splits = {
		parts: new Map([...partFields.keys()].map((part) => [part, parts.strings(part)])),
		exclude: fields.get("exclude") == null ? [] : fields.strings("exclude"),
	};
	fields.end();
	return { splits, path };
}

/** Most names that the patterns of a list may expand to. */
const MOST_NAMES = 10_000_000;

/** The names that the patterns of a list in the file `path` expand to, in order. */
export function expandAll(patterns: readonly string[], path: string): string[] {
	const names: string[] = [];
	for (const pattern of patterns) {
		for (const name of expandIn(path, pattern)) names.push(name);
		if (names.length > MOST_NAMES) throw new UserError(`${path} names more than ${MOST_NAMES} shards in one list.`);
	}
	return names;
}

function expandIn(path: string, pattern: string): string[] {
	try {
		return expandBraces(pattern);
	} catch (error) {
		if (error instanceof UserError) throw new UserError(`${path}: ${error.message}`);
		throw error;
	}
}

/** Shards and exclusions of a split part. */
export function readSplitPart(storage: Storage, folder: string, part: string, splitConfig: string | null): SplitPart {
	const counts = readShardCounts(storage, folder);
	const { splits, path } = readSplits(storage, folder, splitConfig);
	const patterns = splits.parts.get(part);
	if (patterns === undefined) {
		throw new UserError(`${path} has no split part ${part}; it has ${[...splits.parts.keys()].join(", ")}.`);
	}
	const excluded = new Set(expandAll(splits.exclude, path));
	const allShards = expandAll(patterns, path);
	const names = allShards.filter((name) => !excluded.has(name));
	if (names.length === 0) throw new UserError(`The split part ${part} of ${path} has no shards.`);
	const shards = names.map((name) => {
		const count = counts.get(name);
		if (count === undefined) {
			throw new UserError(`The split part ${part} of ${path} names the shard ${name}, which was not prepared.`);
		}
		return { name, path: resolvePath(folder, name), count };
	});
	return { shards, excludes: new Set([...excluded].filter((name) => name.includes("/"))), allShards };
}
