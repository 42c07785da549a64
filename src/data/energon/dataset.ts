/**
 * Opens a dataset, JSONL file or metadataset for training or validation: resolves a path to the list of leaf datasets from
 * which a task encoder builds its pipelines.
 */
import { CryptoHasher } from "bun";
import { UserError } from "../../system/errors.ts";
import { SampleError, unprepared } from "./errors.ts";
import { accessField, type DatasetConfig, matchesPart, readDatasetConfig } from "./format/dataset-config.ts";
import { type FileStore, openFileStore } from "./format/file-store.ts";
import { flatten, type Leaf } from "./format/flatten.ts";
import { IndexedReader, tokenPart } from "./format/indexed.ts";
import { JoinIndex, JoinReader, joinedDatasets, joinIndexPath } from "./format/join-index.ts";
import { JsonlReader } from "./format/jsonl.ts";
import { type DecodeOptions, decodeParts, isImageExtension, namedParts, withAux } from "./format/media.ts";
import { type Join, readMetadataset } from "./format/metadataset.ts";
import { jsonlIndexName, tarIndexName } from "./format/names.ts";
import { type PartFilter, SplitPartReader } from "./format/tar.ts";
import { datasetKind, readSplitPart, type Shard } from "./format/webdataset.ts";
import { type Hook, hook } from "./hook.ts";
import { joinSubflavors, type RawRecord, type RawSample, type Sample, type Subflavors, tokenSample } from "./sample.ts";
import { type Subset, shardWorkers, sliceWorkers, subsetBounds } from "./sharder.ts";
import { nameOf, type Storage } from "./storage/storage.ts";
import type { BlendMode, LoadedDataset } from "./task-encoder.ts";
import { JOINED, SampleLoaderDataset, type SampleReader } from "./wrappers/sample-loader.ts";

export interface LoadOptions {
	readonly training: boolean;
	readonly splitPart: string;
	/** Multiplies the shuffle_over_epochs of every dataset; null = no shuffling. */
	readonly shuffleOverEpochsMultiplier: number | null;
	readonly maxSamplesPerSequence: number | null;
	/** Slices that are open at once; null = 16 for training, 1 for validation. */
	readonly parallelShardIters: number | null;
	/** File names in `.nv-meta`; null = dataset.yaml and split.yaml. */
	readonly datasetConfig: string | null;
	readonly splitConfig: string | null;
	readonly subflavors: Subflavors;
	/** Most tokens of a sample of indexed text, whose documents are cut; absent: whole documents. */
	readonly tokensAtOnce?: number;
}

export const defaultLoadOptions: LoadOptions = {
	training: true,
	splitPart: "train",
	shuffleOverEpochsMultiplier: 1,
	maxSamplesPerSequence: null,
	parallelShardIters: null,
	datasetConfig: null,
	splitConfig: null,
	subflavors: {},
};

/** The leaf datasets of a path, and how they are combined. Throws a UserError for data that cannot be read. */
export function loadDatasets(
	storage: Storage,
	path: string,
	decode: DecodeOptions,
	options: LoadOptions,
): { readonly mode: BlendMode; readonly datasets: readonly LoadedDataset[] } {
	const { splitPart, subflavors, shuffleOverEpochsMultiplier } = options;
	if (!validMultiplier(shuffleOverEpochsMultiplier)) {
		throw new UserError(
			`shuffle_over_epochs_multiplier is ${shuffleOverEpochsMultiplier}; allowed are null, -1 and numbers from 1.`,
		);
	}
	const kind = datasetKind(storage, path);
	const open = (leaf: Leaf) => openLeaf(storage, leaf, decode, options);
	if (kind === "metadataset") {
		if (options.datasetConfig !== null || options.splitConfig !== null) {
			throw new UserError(`${path} is a metadataset: set dataset_config and split_config inside it.`);
		}
		const inherited = { splitPart, subflavors, multiplier: shuffleOverEpochsMultiplier, subset: null };
		const { mode, leaves } = flatten(readMetadataset(storage, path), inherited);
		return { mode, datasets: leaves.map(open) };
	}
	if (kind === "filesystem") throw new UserError(`${path} is a folder of files, which can only be auxiliary data.`);
	if (kind === "invalid") {
		throw unprepared(path);
	}
	const leaf: Leaf = {
		source: { kind: "dataset", path, datasetConfig: options.datasetConfig, splitConfig: options.splitConfig },
		splitPart,
		subflavors,
		shuffleOverEpochs: shuffleOverEpochsMultiplier,
		subset: null,
		aux: new Map(),
		weight: null,
		repetitions: null,
	};
	return { mode: "none", datasets: [open(leaf)] };
}

function validMultiplier(multiplier: number | null): boolean {
	return multiplier === null || multiplier === -1 || (Number.isSafeInteger(multiplier) && multiplier >= 1);
}

/** Most slices that a worker may have open at once. */
const MOST_SLICES = 65_536;

/** How a leaf dataset is divided into slices and shuffled. */
interface Order {
	readonly maxSamplesPerSequence: number | null;
	readonly shuffleOverEpochs: number | null;
	readonly parallelSlices: number;
	readonly subset: Subset | null;
}

function orderOf(path: string, leaf: Leaf, options: LoadOptions, config: DatasetConfig | null): Order {
	const own = config?.overrides ?? {};
	const shuffle = own.shuffleOverEpochs !== undefined ? own.shuffleOverEpochs : leaf.shuffleOverEpochs;
	const parallel = own.parallelShardIters !== undefined ? own.parallelShardIters : options.parallelShardIters;
	const limit = own.maxSamplesPerSequence !== undefined ? own.maxSamplesPerSequence : options.maxSamplesPerSequence;
	const shuffleOverEpochs = options.training ? shuffle : null;
	const parallelSlices = parallel ?? (options.training ? 16 : 1);
	if (!validMultiplier(shuffleOverEpochs)) {
		throw new UserError(
			`${path}: shuffle_over_epochs is ${shuffleOverEpochs}; allowed are null, -1 and integers from 1.`,
		);
	}
	if (!(Number.isInteger(parallelSlices) && parallelSlices >= 1 && parallelSlices <= MOST_SLICES)) {
		throw new UserError(
			`${path}: parallel_shard_iters is ${parallelSlices}; allowed are integers from 1 to ${MOST_SLICES}.`,
		);
	}
	if (limit !== null && !(Number.isInteger(limit) && limit >= 1)) {
		throw new UserError(`${path}: max_samples_per_sequence is ${limit}; allowed are integers from 1.`);
	}
	return { maxSamplesPerSequence: limit, shuffleOverEpochs, parallelSlices, subset: leaf.subset };
}

/** Samples of the subset of `total` samples. */
function samplesOf(total: number, { subset }: Order): number {
	const [start, end] = subsetBounds(total, subset);
	return end - start;
}

function openLeaf(storage: Storage, leaf: Leaf, decode: DecodeOptions, options: LoadOptions): LoadedDataset {
	const { source } = leaf;
	if (source.kind === "join") return openJoin(storage, leaf, source.join, decode, options);
	const stores = [...leaf.aux].map(([name, reference]) => openFileStore(storage, name, reference));
	if (datasetKind(storage, source.path) === "jsonl") {
		return openJsonl(storage, leaf, source.path, stores, decode, options);
	}
	if (datasetKind(storage, source.path) === "indexed") return openIndexed(storage, leaf, source.path, options);
	const config = readDatasetConfig(storage, source.path, source.datasetConfig);
	if (config.sampleType !== null && stores.length > 0) {
		throw new UserError(
			`${source.path} has auxiliary data (aux), which only crude samples can use, but its samples are of the type ${config.sampleType.name}.`,
		);
	}
	const part = readSplitPart(storage, source.path, leaf.splitPart, source.splitConfig);
	const subflavors = joinSubflavors(config.subflavors, leaf.subflavors);
	const order = orderOf(source.path, leaf, options, config);
	const counts = part.shards.map(({ count }) => count);
	const length = counts.reduce((sum, count) => sum + count, 0);
	const reader = (openShards: number) =>
		new SplitPartReader(storage, source.path, part, { wanted: partFilter(config), openShards });
	return {
		path: source.path,
		records: null,
		identity: JSON.stringify([part.shards.map(({ name, count }) => [name, count]), [...part.excludes], order]),
		contents: () => contentsOfShards(storage, part.shards),
		aux: [...leaf.aux.keys()],
		length,
		samples: samplesOf(length, order),
		subflavors,
		crude: config.sampleType === null,
		weight: leaf.weight,
		repetitions: leaf.repetitions,
		build: buildWith(order, [reader], counts, `load ${nameOf(source.path)}`, (record) =>
			withAux(loadSample(record.data[0]!, record, config, subflavors, decode), stores, decode),
		),
	};
}

function openJsonl(
	storage: Storage,
	leaf: Leaf,
	path: string,
	stores: readonly FileStore[],
	decode: DecodeOptions,
	options: LoadOptions,
): LoadedDataset {
	const records = new JsonlReader(storage, path);
	const { length } = records;
	const { subflavors } = leaf;
	const order = orderOf(path, leaf, options, null);
	return {
		path,
		records: { length, read: (index) => recordOf(records.read(index)) },
		identity: JSON.stringify([nameOf(path), order]),
		contents: () => contentsOf(storage, path, jsonlIndexName(path)),
		aux: [...leaf.aux.keys()],
		length,
		samples: samplesOf(length, order),
		subflavors,
		crude: true,
		weight: leaf.weight,
		repetitions: leaf.repetitions,
		build: buildWith(order, [() => new JsonlReader(storage, path)], [length], `load ${nameOf(path)}`, (record) =>
			withAux(crudeSample(record.data[0]!, record, subflavors, { images: null }), stores, decode),
		),
	};
}

function openIndexed(storage: Storage, leaf: Leaf, path: string, options: LoadOptions): LoadedDataset {
	const { subflavors, weight, repetitions } = leaf;
	const { tokensAtOnce = null } = options;
	const reader = new IndexedReader(path, tokensAtOnce);
	const { length } = reader;
	const order = orderOf(path, leaf, options, null);
	return {
		...{ path, records: null, identity: JSON.stringify([nameOf(path), tokensAtOnce, order]), aux: [] },
		contents: () => contentsOf(storage, path, path.replace(/bin$/, "idx")),
		...{ length, samples: samplesOf(length, order), subflavors, crude: false, weight, repetitions },
		build: buildWith(order, [() => reader], [length], `load ${nameOf(path)}`, ({ data, restoreKey }) => {
			const { key, sources, parts } = data[0]!;
			const { buffer, byteOffset, byteLength } = parts.get(tokenPart)!;
			const tokens = new Int32Array(buffer, byteOffset, byteLength / 4);
			return { key, restoreKey, sources, subflavors, type: tokenSample, fields: { tokens } };
		}),
	};
}

/** A record's JSON; null for a record that is not JSON, which counts as a damaged sample. */
function recordOf(raw: RawSample): unknown {
	try {
		return decodeParts(raw, { images: null }).json;
	} catch {
		return null;
	}
}

function openJoin(
	storage: Storage,
	leaf: Leaf,
	join: Join,
	decode: DecodeOptions,
	options: LoadOptions,
): LoadedDataset {
	if (join.parts.some(({ aux }) => aux.size > 0)) {
		throw new UserError(`The join in ${join.file} has auxiliary data (aux), which joins do not support.`);
	}
	const datasets = joinedDatasets(storage, join, leaf.splitPart);
	const path = joinIndexPath(storage, join, datasets);
	if (!storage.isFile(path)) {
		throw new UserError(
			`The join in ${join.file} has no index for the present data: run \`mimo data prepare ${join.file}\`.`,
		);
	}
	const index = new JoinIndex(storage, path);
	const parts = join.parts.map(({ name, path: folder, datasetConfig, subflavors }) => ({
		name,
		config: readDatasetConfig(storage, folder, datasetConfig),
		subflavors,
	}));
	const order = orderOf(join.file, leaf, options, null);
	const readers = datasets.map(
		(dataset, column) => (openShards: number) =>
			new JoinReader(storage, index, column, dataset, { wanted: partFilter(parts[column]!.config), openShards }),
	);
	const load = (record: RawRecord): Sample => {
		const samples = parts.map(({ config, subflavors }, i) => {
			const raw = record.data[i];
			if (!raw) return null;
			const merged = joinSubflavors(joinSubflavors(config.subflavors, subflavors), leaf.subflavors);
			return loadSample(raw, record, config, merged, decode);
		});
		return joinSamples(samples, parts, join.joiner, record);
	};
	return {
		path: join.file,
		records: null,
		identity: JSON.stringify([nameOf(path), index.rows, order]),
		contents: () => datasets.map(({ part }) => contentsOfShards(storage, part.shards)).join(),
		aux: [],
		length: datasets[0]!.part.shards.reduce((sum, { count }) => sum + count, 0),
		samples: samplesOf(index.rows, order),
		subflavors: leaf.subflavors,
		crude: false,
		weight: leaf.weight,
		repetitions: leaf.repetitions,
		build: buildWith(order, readers, index.rows, `join ${nameOf(join.file)}`, load),
	};
}

/** The fields of all joined samples, where those of later datasets take precedence; or a field for each named dataset. */
function joinSamples(
	samples: readonly (Sample | null)[],
	parts: readonly { readonly name: string | null }[],
	type: string,
	record: RawRecord,
): Sample {
	const primary = samples[0];
	if (!primary) throw new SampleError("A joined sample lacks its first dataset's part.");
	const fields: Record<string, unknown> = {};
	for (const [i, sample] of samples.entries()) {
		const { name } = parts[i]!;
		if (name !== null) fields[name] = sample?.fields ?? null;
		else if (sample) Object.assign(fields, sample.fields);
	}
	const sources = [...primary.sources, ...samples.flatMap((sample) => sample?.sources ?? [])];
	return { ...primary, type, fields, sources, restoreKey: [JOINED, ...record.restoreKey] };
}

/** `counts`: the number of samples of every shard, or of rows of a join. */
function buildWith(
	order: Order,
	readers: readonly ((openShards: number) => SampleReader)[],
	counts: readonly number[] | number,
	name: string,
	load: (record: RawRecord) => Sample,
): LoadedDataset["build"] {
	const loader: Hook<RawRecord, Sample> = hook(name, load);
	return (worker, rotation) => {
		const { rank, worldSize, numWorkers } = worker.config;
		const division = { rank, worldSize, numWorkers, rotation, ...order };
		const sliceOffsets = typeof counts === "number" ? sliceWorkers(counts, division) : shardWorkers(counts, division);
		const records = new SampleLoaderDataset(worker, {
			readers: readers.map((open) => open(order.parallelSlices)),
			sliceOffsets,
			shuffleOverEpochs: order.shuffleOverEpochs,
			parallelSlices: order.parallelSlices,
		});
		return { records, load: loader };
	};
}

/** Fields whose values are lists with images. */
const imageLists: readonly string[] = ["sequence", "images"];

function partFilter(config: DatasetConfig): PartFilter | null {
	const wanted =
		config.sampleType === null
			? config.parts
			: [...config.fields.values()].flatMap((access) => access.map(([part]) => part!));
	if (wanted === null) return null;
	const names = new Set(wanted);
	const patterns = wanted.filter((name) => name.includes("*"));
	const hasLists = config.sampleType !== null && imageLists.some((field) => config.fields.has(field));
	return (extension) =>
		names.has(extension) ||
		patterns.some((pattern) => matchesPart(pattern, extension)) ||
		(hasLists && isImageExtension(extension));
}

/** Decodes a raw sample into a typed or crude sample. Throws where a part or field is damaged or missing. */
export function loadSample(
	raw: RawSample,
	record: RawRecord,
	config: DatasetConfig,
	subflavors: Subflavors,
	decode: DecodeOptions,
): Sample {
	if (config.sampleType === null) return crudeSample(raw, record, subflavors, decode);
	// Image parts that the field_map does not name are decoded when a list names them.
	const mapped = [...config.fields.values()].flatMap((access) => access.map(([part]) => part!));
	const own = new Map([...raw.parts].filter(([extension]) => mapped.some((part) => matchesPart(part, extension))));
	const parts = decodeParts({ ...raw, parts: own }, decode);
	const fields: Record<string, unknown> = {};
	for (const [field, access] of config.fields) {
		const value = accessField(parts, access, raw.key);
		fields[field] = imageLists.includes(field) ? namedParts(value, raw, decode) : value;
	}
	const missing = config.sampleType.required.find((field) => !config.fields.has(field));
	if (missing !== undefined) {
		throw new SampleError(
			`Sample ${raw.key}: the field_map has no ${missing}, which ${config.sampleType.name} needs.`,
			raw.key,
		);
	}
	const { key, sources } = raw;
	return { key, restoreKey: record.restoreKey, sources, subflavors, type: config.sampleType.name, fields };
}

/** Decodes a raw sample into a crude sample, with its parts by extension. */
export function crudeSample(raw: RawSample, record: RawRecord, subflavors: Subflavors, decode: DecodeOptions): Sample {
	const fields = decodeParts(raw, decode);
	return { key: raw.key, restoreKey: record.restoreKey, sources: raw.sources, subflavors, type: "CrudeSample", fields };
}

// Identifies the content of a data set by samples of its indexes: a resumed run has to read the same data as the
// saved run.

/** Number of shards that are hashed, spread over the part, and bytes of each index at its beginning and end. */
const SHARDS = 8;
const INDEX_BYTES = 64 * 1024;

/** Hash of a split part: of the sizes of some of its shards and of the offsets of their samples. */
function contentsOfShards(storage: Storage, shards: readonly Shard[]): string {
	const hash = new CryptoHasher("sha256");
	const count = Math.min(SHARDS, shards.length);
	for (let i = 0; i < count; i++) {
		const { path } = shards[Math.floor((i * shards.length) / count)]!;
		addFiles(hash, storage, path, tarIndexName(path));
	}
	return hash.digest("hex");
}

/** Hash of a file of records: of its size and of its index. */
function contentsOf(storage: Storage, path: string, index: string): string {
	const hash = new CryptoHasher("sha256");
	addFiles(hash, storage, path, index);
	return hash.digest("hex");
}

function addFiles(hash: CryptoHasher, storage: Storage, path: string, indexPath: string): void {
	const data = storage.open(path);
	const index = storage.open(indexPath);
	try {
		hash.update(`${data.size} ${index.size}\0`);
		hash.update(index.read(0, INDEX_BYTES));
		hash.update(index.read(Math.max(0, index.size - INDEX_BYTES), INDEX_BYTES));
	} finally {
		data.close();
		index.close();
	}
}
