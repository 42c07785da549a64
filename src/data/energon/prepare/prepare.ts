/**
 * Prepares a local dataset for Energon and this program (docs/spec/energon.md §1.8): indexes beside every shard, the `.nv-meta`
 * folder, the split.
 */
import { randomUUID } from "node:crypto";
import { existsSync, mkdirSync, renameSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import { unprepared } from "../errors.ts";
import { sampleTypeNames, sampleTypeOf } from "../format/dataset-config.ts";
import { buildJoinIndex, joinedDatasets, joinIndexPath } from "../format/join-index.ts";
import { indexJsonl, OffsetIndex } from "../format/jsonl.ts";
import { mediaOfRecord } from "../format/media.ts";
import { type Join, type Metadataset, readMetadataset } from "../format/metadataset.ts";
import {
	byPathParts,
	INDEX_SQLITE,
	INDEX_UUID,
	INFO_JSON,
	INFO_YAML,
	jsonlIndexName,
	META_FOLDER,
	tarIndexName,
} from "../format/names.ts";
import { parseJsonBytes } from "../format/python-text.ts";
import { TarError } from "../format/tar.ts";
import { collapseBraces, expandBraces, readShardCounts } from "../format/webdataset.ts";
import { PythonRandom } from "../random/python-random.ts";
import { LocalFile, LocalStorage } from "../storage/open.ts";
import { folderOf, type Storage } from "../storage/storage.ts";
import { indexShard, prefixMembers, type ShardIndex, SqliteIndexWriter } from "./shard-index.ts";

/** Version of the Energon package whose formats are written. */
const ENERGON_VERSION = "7.4.0";

export interface PrepareOptions {
	/** Shares of train, val and test, such as "8,1,1"; null: `splitParts` has the split. */
	readonly splitRatio: string | null;
	/** "part:regular expression", matched from the beginning of shard names. */
	readonly splitParts: readonly string[];
	/** A regular expression; shards whose name it matches anywhere are left out. */
	readonly exclude: string | null;
	readonly shuffleTars: boolean;
	/** Write only the indexes `.tar.idx` and `index.sqlite`. */
	readonly tarIndexOnly: boolean;
	readonly forceOverwrite: boolean;
	readonly fixDuplicates: boolean;
	/** Prepare the whole samples of a truncated tar, as Energon does; otherwise a truncated tar is refused. */
	readonly keepCutOff: boolean;
	/** Sample type for dataset.yaml ("CaptioningSample", "CrudeWebdataset"); null: no dataset.yaml is written. */
	readonly sampleType: string | null;
	/** JSON of parts by field, such as {"image": "jpg", "caption": "txt"}. */
	readonly fieldMap: string | null;
	/** Keys of the configuration that dataset.yaml sets for crude samples, under `mimo` among the subflavors. */
	readonly settings: Readonly<Record<string, string>>;
	readonly datasetYamlName: string;
	/** Receives progress and warnings. */
	readonly report: (line: string) => void;
}

export const defaultPrepareOptions: PrepareOptions = {
	splitRatio: null,
	splitParts: [],
	exclude: null,
	shuffleTars: false,
	tarIndexOnly: false,
	forceOverwrite: false,
	fixDuplicates: false,
	keepCutOff: false,
	sampleType: null,
	fieldMap: null,
	settings: {},
	datasetYamlName: "dataset.yaml",
	report: () => {},
};

/** Result of a preparation. */
export interface Prepared {
	readonly kind: "webdataset" | "jsonl" | "metadataset";
	readonly samples: number;
	readonly shards: number;
	/** Extensions of parts; rare ones may be missing. */
	readonly parts: readonly string[];
}

/** Prepares a folder of tar files, a JSONL file or a metadataset. Throws a UserError; then no unfinished files remain. */
export function prepare(path: string, options: PrepareOptions): Prepared {
	if (!existsSync(path)) throw new UserError(`${path} does not exist.`);
	if (statSync(path).isDirectory()) return prepareFolder(path, options);
	if (path.endsWith(".jsonl")) return prepareJsonl(path, options);
	if (path.endsWith(".yaml")) return prepareMetadataset(path, options);
	throw unprepared(path);
}

function writeWhole(path: string, content: string | Uint8Array): void {
	writeFileSync(`${path}.tmp`, content);
	renameSync(`${path}.tmp`, path);
}

/** Number of records of a JSONL file that are checked. */
const LOOKED_AT = 1000;

/** A record; null for a line that is not JSON, which `mimo data lint` reports. */
function recordOfLine(line: Uint8Array): unknown {
	try {
		return parseJsonBytes(line);
	} catch {
		return null;
	}
}

function prepareJsonl(path: string, { report }: PrepareOptions): Prepared {
	const file = LocalFile.open(path);
	const bytes = file.read(0, file.size);
	const offsets = indexJsonl(bytes, path);
	let isWarned = false;
	for (let i = 0; i + 1 < Math.min(offsets.length, LOOKED_AT); i++) {
		const record = recordOfLine(bytes.subarray(offsets[i], offsets[i + 1]));
		const refused = mediaOfRecord(record, path, true);
		if (refused !== null) throw new UserError(`${path}, record ${i}: ${refused}.`);
		const media = isWarned ? null : mediaOfRecord(record, path);
		if (media === null) continue;
		// The auxiliary data of a metadataset may have the record's images.
		report(`warning: ${path}, record ${i}: ${media}`);
		isWarned = true;
	}
	writeWhole(jsonlIndexName(path), OffsetIndex.encode(offsets));
	return { kind: "jsonl", samples: offsets.length - 1, shards: 1, parts: ["json"] };
}

/** Builds the join indexes of a metadataset and of the metadatasets that it names. */
function prepareMetadataset(path: string, { report }: PrepareOptions): Prepared {
	const storage: Storage = new LocalStorage();
	let rows = 0;
	const metadataset: Metadataset = readMetadataset(storage, path);
	for (const [part, node] of metadataset.splits) {
		for (const { join: joined, splitPart } of joinsIn(node, part, new Set())) {
			const datasets = joinedDatasets(storage, joined, splitPart);
			const index = joinIndexPath(storage, joined, datasets);
			const bytes = buildJoinIndex(storage, datasets);
			mkdirSync(folderOf(index), { recursive: true });
			writeWhole(index, bytes);
			rows += (bytes.length - 16) / (24 * datasets.length);
			report(`joined ${part} of ${path}: ${index}`);
		}
	}
	return { kind: "metadataset", samples: rows, shards: 0, parts: [] };
}

type TreeNode = Metadataset["splits"] extends ReadonlyMap<string, infer Node> ? Node : never;

/** `seen`: parts of nested files that were visited, which may be named many times. */
function* joinsIn(node: TreeNode, splitPart: string, seen: Set<string>): Generator<{ join: Join; splitPart: string }> {
	switch (node.kind) {
		case "join":
			yield { join: node.join, splitPart: node.join.splitPart ?? splitPart };
			break;
		case "reference": {
			const part = node.reference.splitPart ?? splitPart;
			const below = node.nested?.splits.get(part);
			const place = JSON.stringify([node.reference.path, part]);
			if (below && !seen.has(place)) yield* joinsIn(below, part, seen.add(place));
			break;
		}
		default:
			for (const { node: inner } of node.items) yield* joinsIn(inner, splitPart, seen);
	}
}

function prepareFolder(folder: string, options: PrepareOptions): Prepared {
	const { report } = options;
	const meta = join(folder, META_FOLDER);
	const prepared = existsSync(join(meta, INFO_JSON)) || existsSync(join(meta, INFO_YAML));
	if (prepared && !options.forceOverwrite && !options.tarIndexOnly) {
		throw new UserError(`${folder} is prepared already; --force-overwrite prepares it again.`);
	}
	const config = datasetConfig(options);
	const names = shardNames(folder, options);
	const split = options.tarIndexOnly ? null : splitter(options);
	if (options.fixDuplicates) prefixMembers(folder, names, report);
	mkdirSync(meta, { recursive: true });
	const { counts, parts } = writeIndexes(folder, names, options);
	const samples = [...counts.values()].reduce((sum, count) => sum + count, 0);
	if (split !== null) {
		const info = { energon_version: ENERGON_VERSION, shard_counts: Object.fromEntries(counts) };
		writeWhole(join(meta, "split.yaml"), splitYaml(split(names)));
		if (config !== null) writeWhole(join(meta, options.datasetYamlName), config);
		// A dataset with this file counts as prepared, so it is written last.
		writeWhole(join(meta, INFO_JSON), JSON.stringify(info, null, 2));
	}
	return { kind: "webdataset", samples, shards: names.length, parts };
}

function shardNames(folder: string, { tarIndexOnly, exclude }: PrepareOptions): string[] {
	if (tarIndexOnly) return [...readShardCounts(new LocalStorage(), folder).keys()];
	const found = [...new Bun.Glob("**/*.{tar,tgz}").scanSync({ cwd: folder, dot: true })];
	const pattern = exclude === null ? null : regularExpression(exclude, "--exclude");
	const names = found.filter((name) => !pattern?.test(name)).sort(byPathParts);
	const compressed = names.find((name) => name.endsWith(".tgz"));
	if (compressed !== undefined) {
		throw new UserError(
			`${join(folder, compressed)} is compressed, so single samples of it cannot be read: unpack it to .tar.`,
		);
	}
	if (names.length === 0)
		throw new UserError(`${folder} has no tar files${exclude === null ? "" : " besides those excluded"}.`);
	return names;
}

function regularExpression(text: string, flag: string): RegExp {
	try {
		return new RegExp(text);
	} catch (error) {
		throw new UserError(`${flag}: ${text} is not a regular expression: ${(error as Error).message}.`);
	}
}

/** Writes `.tar.idx`, `index.sqlite` and its uuid; returns samples per shard and the extensions. */
function writeIndexes(
	folder: string,
	names: readonly string[],
	{ keepCutOff, report }: PrepareOptions,
): { counts: Map<string, number>; parts: string[] } {
	const meta = join(folder, META_FOLDER);
	const unfinished = join(meta, `${INDEX_SQLITE}.tmp`);
	rmSync(unfinished, { force: true });
	const counts = new Map<string, number>();
	const parts = new Set<string>();
	try {
		using writer = new SqliteIndexWriter(unfinished);
		for (const [i, name] of names.entries()) {
			const index = readShard(join(folder, name));
			if (index.cutOff !== null) {
				const what = `${join(folder, name)} ends early: ${index.cutOff}. ${index.samples.length} samples begin before that`;
				if (!keepCutOff) {
					throw new UserError(
						`${what}; write it again, leave it out with --exclude, or --keep-cut-off prepares those.`,
					);
				}
				report(`warning: ${what}; they are prepared, the last perhaps without all its parts`);
			}
			if (!index.hasEnd) report(`warning: ${name} has no end mark: files after its last sample may be missing`);
			if (index.samples.length === 0) throw new UserError(`${join(folder, name)} has no samples.`);
			writer.add(i, name, index);
			writeWhole(join(folder, tarIndexName(name)), OffsetIndex.encode(index.offsets));
			counts.set(name, index.samples.length);
			for (const sample of index.samples) {
				if (parts.size >= 50) break;
				for (const { extension } of sample.parts) parts.add(extension);
			}
			report(`${i + 1}/${names.length} ${name}: ${counted(index.samples.length, "sample")}`);
		}
		report("building the index by key");
		writer.finish();
	} catch (error) {
		rmSync(unfinished, { force: true });
		throw error;
	}
	renameSync(unfinished, join(meta, INDEX_SQLITE));
	writeWhole(join(meta, INDEX_UUID), randomUUID());
	return { counts, parts: [...parts].sort() };
}

function readShard(path: string): ShardIndex {
	const file = LocalFile.open(path);
	try {
		return indexShard(file);
	} catch (error) {
		if (error instanceof TarError) throw new UserError(`${path} is damaged: ${error.message}.`);
		throw error;
	} finally {
		file.close();
	}
}

type Split = ReadonlyMap<string, readonly string[]>;

/** Divides shards among the parts of the split. */
function splitter(options: PrepareOptions): (names: readonly string[]) => Split {
	if (options.splitParts.length > 0) {
		const parts = options.splitParts.map((text) => {
			const [, part, pattern] = /^([^:]+):(.*)$/s.exec(text) ?? [];
			if (part === undefined) throw new UserError(`--split-parts ${text} is not of the form part:pattern.`);
			const patterns = expandBraces(pattern!).map((one) => regularExpression(`^(?:${one})`, "--split-parts"));
			return { part, patterns };
		});
		return (names) =>
			new Map(parts.map(({ part, patterns }) => [part, names.filter((name) => patterns.some((p) => p.test(name)))]));
	}
	if (options.splitRatio === null)
		throw new UserError("--split-ratio or --split-parts is needed to divide the shards.");
	const shares = options.splitRatio.split(",").map((text) => (text.trim() === "" ? Number.NaN : Number(text)));
	const total = shares.reduce((sum, share) => sum + share, 0);
	if (shares.length !== 3 || !shares.every((share) => share >= 0) || !(total > 0)) {
		throw new UserError(
			`--split-ratio ${options.splitRatio} is not three shares of train, val and test, such as 8,1,1.`,
		);
	}
	return (names) => {
		const shuffled = [...names];
		if (options.shuffleTars) new PythonRandom(42).shuffle(shuffled);
		let sum = 0;
		let start = 0;
		return new Map(
			["train", "val", "test"].map((part, i) => {
				sum += shares[i]! / total;
				const end = Math.floor(shuffled.length * sum);
				const taken = shuffled.slice(start, end);
				start = end;
				if (taken.length === 0 && shares[i]! > 0) {
					options.report(
						`warning: ${part} gets none of ${counted(names.length, "shard")}, too few for ${options.splitRatio}`,
					);
				}
				return [part, taken];
			}),
		);
	};
}

function splitYaml(split: Split): string {
	const lines = ["split_parts:"];
	for (const [part, names] of split) {
		const patterns = collapseBraces(names);
		lines.push(`  ${yamlString(part)}:${patterns.length === 0 ? " []" : ""}`);
		for (const pattern of patterns) lines.push(`  - ${yamlString(pattern)}`);
	}
	return `${lines.join("\n")}\nexclude: []\n`;
}

/** A plain scalar where that is safe, else a single-quoted string. */
function yamlString(text: string): string {
	const plain = /^[A-Za-z0-9_/][\w ./{}[\],+-]*$/.test(text) && !/[ ]$|: | #/.test(text);
	const looksLikeOther = /^(?:null|true|false|yes|no|on|off|y|n|~|[-+.\d_e]+)$/i.test(text);
	return plain && !looksLikeOther ? text : `'${text.replaceAll("'", "''")}'`;
}

/** Text of dataset.yaml; null: the file is not written. */
function datasetConfig({ sampleType, fieldMap, settings, tarIndexOnly }: PrepareOptions): string | null {
	if (sampleType === null || tarIndexOnly) return null;
	if (sampleType === "CrudeWebdataset") {
		const own = Object.entries(settings).map(([key, value]) => `    ${key}: ${yamlString(value)}\n`);
		const subflavors = own.length === 0 ? "" : `subflavors:\n  mimo:\n${own.join("")}`;
		return `__module__: megatron.energon\n__class__: CrudeWebdataset\n${subflavors}`;
	}
	const type = sampleTypeOf(sampleType);
	if (type === undefined) {
		throw new UserError(
			`There is no sample type ${sampleType}; there are ${[...sampleTypeNames, "CrudeWebdataset"].join(", ")}.`,
		);
	}
	const fields = parseFieldMap(fieldMap, sampleType);
	const known = [...type.required, ...type.optional];
	for (const field of Object.keys(fields)) {
		if (!known.includes(field))
			throw new UserError(`--field-map has ${field}, but ${sampleType} has ${known.join(", ")}.`);
	}
	const lines = Object.entries(fields).map(([field, source]) => `  ${field}: ${yamlString(source)}`);
	return `sample_type:\n  __module__: megatron.energon\n  __class__: ${sampleType}\nfield_map:\n${lines.join("\n")}\n`;
}

function parseFieldMap(text: string | null, sampleType: string): Record<string, string> {
	let fields: unknown;
	try {
		fields = JSON.parse(text ?? "null");
	} catch (error) {
		throw new UserError(`--field-map is not JSON: ${(error as Error).message}.`);
	}
	const isMap = fields !== null && typeof fields === "object" && !Array.isArray(fields);
	if (!isMap || !Object.values(fields as object).every((source) => typeof source === "string")) {
		throw new UserError(
			`--sample-type ${sampleType} needs --field-map, JSON such as {"image": "jpg", "caption": "txt"}.`,
		);
	}
	return fields as Record<string, string>;
}
