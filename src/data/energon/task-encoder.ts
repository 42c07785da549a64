/**
 * The functions of a task on samples, and the pipeline of these functions (docs/spec/energon.md §3.4, §5.1): cooking, encoding,
 * packing, batching. A step that the task lacks has no node in the pipeline.
 */
import { UserError } from "../../system/errors.ts";
import type { DecodeOptions } from "./format/media.ts";
import { type Hook, hook } from "./hook.ts";
import type { Keyed, RawRecord, Sample, Subflavors } from "./sample.ts";
import type { Worker } from "./worker.ts";
import { BatchDataset } from "./wrappers/batch.ts";
import { BlendDataset, ConcatDataset } from "./wrappers/blend.ts";
import type { Dataset } from "./wrappers/dataset.ts";
import { EpochizeDataset, LimitDataset, RepeatDataset } from "./wrappers/limit.ts";
import { MapDataset } from "./wrappers/map.ts";
import { type Division, type Groups, PackingDataset } from "./wrappers/packing.ts";
import { ShuffleBufferDataset } from "./wrappers/shuffle-buffer.ts";

/** Converts a crude sample into a typed sample; selected by the data set's subflavors. */
export interface Cooker {
	readonly cook: Hook<Sample, Sample>;
	/** Subflavors of the data sets for this cooker; empty: all data sets. */
	readonly hasSubflavors: Subflavors;
}

/** Steps of a task. Elements between steps may be of any type that has a restore key. */
export interface TaskEncoder {
	readonly decode: DecodeOptions;
	readonly cookers: readonly Cooker[];
	readonly preencodeSample?: Hook<Sample, Keyed>;
	readonly selectSamplesToPack?: Hook<readonly Keyed[], Groups<Keyed> | Division<Keyed>>;
	readonly packSelectedSamples?: Hook<readonly Keyed[], Keyed>;
	readonly batch: Hook<readonly Keyed[], Keyed>;
	readonly encodeBatch?: Hook<Keyed, Keyed>;
}

/** How the datasets of a metadataset are combined. */
export type BlendMode = "none" | "weight" | "repetitions";

/** A leaf dataset, before its pipeline is built for a worker. */
export interface LoadedDataset {
	/** Folder or file, for messages. */
	readonly path: string;
	/** Shards, exclusions and subset, on which the order of samples depends. */
	readonly identity: string;
	/** Digest of the content of its files, which this reads. */
	contents(): string;
	/** Names of its auxiliary data in the metadataset. */
	readonly aux: readonly string[];
	/** Records of a JSONL file, where a record that is not JSON is null; null for other data sets. */
	readonly records: { readonly length: number; read(index: number): unknown } | null;
	/** Number of samples of the split part, without regard to subsets. */
	readonly length: number;
	/** Number of samples of a pass: those of the subset. */
	readonly samples: number;
	readonly subflavors: Subflavors;
	readonly crude: boolean;
	readonly weight: number | null;
	readonly repetitions: number | null;
	/** Loader and load step of a worker; `rotation` rotates the workers that receive the remaining samples. */
	build(worker: Worker, rotation: number): { records: Dataset<RawRecord>; load: Hook<RawRecord, Sample> };
}

export interface BatchOptions {
	readonly batchSize: number | null;
	readonly batchDropLast: boolean;
	readonly packingBufferSize: number | null;
}

export interface TrainOptions extends BatchOptions {
	readonly blendMode: BlendMode;
	readonly repeat: boolean;
	readonly shuffleBufferSize: number | null;
	/** Number of outputs in a virtual epoch of the rank; 0 = no virtual epochs. */
	readonly virtualEpochLength: number;
}

/** Rotation of every dataset: number of samples of earlier datasets, modulo all workers. */
function rotations(datasets: readonly LoadedDataset[], worker: Worker): number[] {
	const workers = Math.max(1, worker.config.numWorkers) * worker.config.worldSize;
	let before = 0;
	return datasets.map(({ length }) => {
		const rotation = before % workers;
		before += length;
		return rotation;
	});
}

/** The nodes that load a dataset and, for crude data, cook its samples. */
function load(dataset: LoadedDataset, rotation: number, task: TaskEncoder, worker: Worker): Dataset<Sample> {
	const { records, load: loader } = dataset.build(worker, rotation);
	const samples = new MapDataset<RawRecord, Sample>(records, loader);
	return dataset.crude ? new MapDataset(samples, cookerOf(dataset, task).cook) : samples;
}

/** The first cooker whose subflavors the data set has. Throws a UserError if no cooker matches. */
function cookerOf(dataset: Pick<LoadedDataset, "subflavors">, task: TaskEncoder): Cooker {
	if (task.cookers.length === 0) throw new UserError("The data set is crude, but the task has no cookers.");
	const cooker = task.cookers.find(({ hasSubflavors }) =>
		Object.entries(hasSubflavors).every(([name, value]) => dataset.subflavors[name] === value),
	);
	if (cooker) return cooker;
	throw new UserError(`No cooker of the task is for the subflavors ${JSON.stringify(dataset.subflavors)}.`);
}

/** The training pipeline of one worker. */
export function buildTrain(
	datasets: readonly LoadedDataset[],
	task: TaskEncoder,
	worker: Worker,
	options: TrainOptions,
): Dataset<Keyed> {
	if (datasets.length === 0) throw new UserError("The metadataset names no datasets.");
	if (datasets.some(({ crude }) => crude) && task.cookers.length === 0) {
		throw new UserError("The data set is crude, but the task has no cookers.");
	}
	const rotation = rotations(datasets, worker);
	const loaded = datasets.map((dataset, i) => load(dataset, rotation[i]!, task, worker));
	let sources: Dataset<Sample>[];
	let weights: number[];
	let repeat = false;
	if (options.blendMode === "repetitions" || (!options.repeat && options.blendMode === "none")) {
		sources = loaded.map((dataset, i) => {
			const repetitions = datasets[i]!.repetitions ?? 1;
			return repetitions === 1 ? dataset : new RepeatDataset(dataset, repetitions);
		});
		weights = datasets.map(({ length, repetitions }) => length * (repetitions ?? 1));
		repeat = options.repeat;
	} else {
		if (!options.repeat) {
			throw new UserError(
				"A blend by weights is endless, so it cannot be combined with repeat off; use blend_epochized.",
			);
		}
		sources = loaded.map((dataset) => new RepeatDataset(dataset, null));
		weights = datasets.map(({ weight }) => (options.blendMode === "weight" ? (weight ?? 1) : 1));
	}
	let samples: Dataset<Sample> = sources.length > 1 ? new BlendDataset(worker, sources, weights) : sources[0]!;
	if (repeat) samples = new RepeatDataset(samples, null);
	if (options.shuffleBufferSize !== null && options.shuffleBufferSize > 1) {
		samples = new ShuffleBufferDataset(samples, options.shuffleBufferSize);
	}
	const outputs = batchUp(encode(samples, task), task, options);
	return options.virtualEpochLength > 0 ? new EpochizeDataset(outputs, options.virtualEpochLength) : outputs;
}

/** The validation pipeline of one worker: every sample once, in order; at most `limit` outputs a pass. */
export function buildValidation(
	datasets: readonly LoadedDataset[],
	task: TaskEncoder,
	worker: Worker,
	options: BatchOptions & { readonly limit: number | null },
): Dataset<Keyed> {
	if (datasets.length === 0) throw new UserError("The metadataset names no datasets.");
	const rotation = rotations(datasets, worker);
	const loaded = datasets.map((dataset, i) => load(dataset, rotation[i]!, task, worker));
	const samples = loaded.length > 1 ? new ConcatDataset(worker, loaded) : loaded[0]!;
	const outputs = batchUp(encode(samples, task), task, options);
	return options.limit !== null && options.limit > 0 ? new LimitDataset(outputs, options.limit) : outputs;
}

function encode(samples: Dataset<Sample>, { preencodeSample }: TaskEncoder): Dataset<Keyed> {
	return preencodeSample === undefined ? samples : new MapDataset<Sample, Keyed>(samples, preencodeSample);
}

function batchUp(samples: Dataset<Keyed>, task: TaskEncoder, options: BatchOptions): Dataset<Keyed> {
	const { batchSize, batchDropLast, packingBufferSize } = options;
	const { selectSamplesToPack: select, packSelectedSamples: pack } = task;
	let outputs = samples;
	if (packingBufferSize !== null) {
		if (!select || !pack) {
			throw new UserError("packing_buffer_size is set, but the task does not select and pack samples.");
		}
		outputs = new PackingDataset(outputs, packingBufferSize, { select, pack });
	}
	if (batchSize === null) return outputs;
	outputs = new BatchDataset(outputs, batchSize, task.batch, batchDropLast);
	return task.encodeBatch ? new MapDataset<Keyed, Keyed>(outputs, task.encodeBatch) : outputs;
}

/** A batch or pack, with the keys, sources and restore keys of its members. */
export interface Collected extends Keyed {
	readonly items: readonly Keyed[];
}

/** The batch function that returns the list of samples. */
export const collect = hook<readonly Keyed[], Collected>("batch", (items) => ({ restoreKey: [], items }));
