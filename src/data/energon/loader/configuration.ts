/**
 * The settings that determine the samples of a loader, as plain values that can be sent to threads and stored in states.
 */
import { CryptoHasher } from "bun";
import type { Images } from "../../../native/images.ts";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import { configuredTokenizer, tokenizerIdentity } from "../../text/configured-tokenizer.ts";
import { byteTokenizer } from "../../text/tokenizer.ts";
import { checkTrainable } from "../../vision-language/dataset-checks.ts";
import { buildVisionLanguageTask, type VisionLanguageTask } from "../../vision-language/task.ts";
import { defaultLoadOptions, type LoadOptions, loadDatasets } from "../dataset.ts";
import type { ErrorHandler, Remark } from "../errors.ts";
import { hook } from "../hook.ts";
import type { Keyed, Sample } from "../sample.ts";
import type { StorageConfiguration } from "../storage/open.ts";
import type { Storage } from "../storage/storage.ts";
import {
	type BlendMode,
	buildTrain,
	buildValidation,
	type Cooker,
	collect,
	type LoadedDataset,
	type TaskEncoder,
} from "../task-encoder.ts";
import { Worker, type WorkerConfig, WorkerStream } from "../worker.ts";

export interface LoaderConfiguration {
	/** Data set folder, JSONL file or metadataset; a path or URL. */
	readonly path: string;
	readonly storage: StorageConfiguration;
	readonly task: TaskConfiguration;
	readonly load: LoadOptions;
	/** Data-parallel rank, number of ranks, logical workers of a rank (0 = a single worker). */
	readonly rank: number;
	readonly worldSize: number;
	readonly numWorkers: number;
	readonly seedOffset: number;
	readonly batchSize: number | null;
	readonly batchDropLast: boolean;
	readonly packingBufferSize: number | null;
	readonly shuffleBufferSize: number | null;
	/** Training: number of outputs in a virtual epoch of the rank; 0 = no virtual epochs. */
	readonly virtualEpochLength: number;
	/** Validation: most outputs in a pass of the rank. */
	readonly limit: number | null;
	readonly repeat: boolean;
}

export const defaultLoaderConfiguration: Omit<LoaderConfiguration, "path" | "task"> = {
	storage: { cacheFolder: null, cacheBytes: 0 },
	load: defaultLoadOptions,
	rank: 0,
	worldSize: 1,
	numWorkers: 2,
	seedOffset: 0,
	batchSize: null,
	batchDropLast: false,
	packingBufferSize: null,
	shuffleBufferSize: null,
	virtualEpochLength: 0,
	limit: null,
	repeat: true,
};

/** Builds the pipelines of a data set. */
export class Pipelines {
	readonly #configuration: LoaderConfiguration;
	readonly #task: TaskEncoder;
	readonly #mode: BlendMode;
	readonly #datasets: readonly LoadedDataset[];

	/** Opens the data set. Throws a UserError for errors in it or in the configuration. */
	constructor(configuration: LoaderConfiguration, storage: Storage, images: Images, remark: Remark = () => {}) {
		this.#configuration = configuration;
		this.#task = buildTask(configuration.task, images, remark);
		const { path, load, task } = configuration;
		const cut = task.kind === "vision-language" ? { tokensAtOnce: task.sequenceLength } : {};
		const { mode, datasets } = loadDatasets(storage, path, this.#task.decode, { ...load, ...cut });
		if (configuration.task.kind === "vision-language") checkTrainable(datasets, configuration.task);
		this.#mode = mode;
		this.#datasets = datasets;
	}

	/** The stream of logical worker `id` of a data rank. */
	stream(rank: number, id: number, errorHandler: ErrorHandler): WorkerStream<Keyed> {
		const { worldSize, numWorkers, seedOffset, load } = this.#configuration;
		const restoreErrorHandler: ErrorHandler = (error) => {
			throw error;
		};
		const config: WorkerConfig = { rank, worldSize, numWorkers, seedOffset, errorHandler, restoreErrorHandler };
		const worker = new Worker(config, id);
		const options = this.#configuration;
		const pipeline = load.training
			? buildTrain(this.#datasets, this.#task, worker, { ...options, blendMode: this.#mode })
			: buildValidation(this.#datasets, this.#task, worker, options);
		return new WorkerStream(worker, pipeline, numWorkers > 0 ? "SavableDatasetWrapper" : "SimpleSavableDatasetWrapper");
	}

	/** Settings on which a saved state depends, by name; equal settings give equal streams. */
	settings(): Readonly<Record<string, string>> {
		const { path: _, storage: __, rank: ___, worldSize, numWorkers, load, task, ...rest } = this.#configuration;
		const datasets = this.#datasets.map(({ identity, length, subflavors, weight, repetitions }) => [
			identity,
			length,
			subflavors,
			weight,
			repetitions,
		]);
		const digest = new CryptoHasher("sha256").update(JSON.stringify([this.#mode, datasets])).digest("hex");
		const contents = this.#datasets.map((dataset) => dataset.contents()).join();
		const workers = worldSize * Math.max(1, numWorkers);
		const named = {
			...rest,
			...load,
			task: taskIdentity(task),
			"data workers of all ranks": workers,
			"shards and weights": digest,
			"contents of the shards": new CryptoHasher("sha256").update(contents).digest("hex"),
		};
		return Object.fromEntries(Object.entries(named).map(([name, value]) => [name, JSON.stringify(value)]));
	}
}

/** Throws a UserError for invalid numbers of ranks, workers or samples. */
export function checkConfiguration(configuration: LoaderConfiguration): void {
	const { rank, worldSize, numWorkers } = configuration;
	if (!(Number.isInteger(worldSize) && worldSize >= 1 && Number.isInteger(rank) && rank >= 0 && rank < worldSize)) {
		throw new UserError(`Data rank ${rank} of ${counted(worldSize, "rank")} does not exist.`);
	}
	if (!(Number.isInteger(numWorkers) && numWorkers >= 0)) {
		throw new UserError(`num_workers is ${numWorkers}; allowed are integers from 0.`);
	}
	for (const name of ["batchSize", "packingBufferSize", "shuffleBufferSize", "limit"] as const) {
		const value = configuration[name];
		if (value !== null && !(Number.isInteger(value) && value >= 1))
			throw new UserError(`${name} is ${value}; allowed are integers from 1.`);
	}
}

/** Unchanged samples for tools: undecoded or decoded parts. */
interface PlainTask {
	readonly kind: "raw" | "decoded";
}

export type TaskConfiguration = PlainTask | VisionLanguageTask;

/** Leaves crude samples unchanged. */
const asItIs: Cooker = { cook: hook("cook", (sample: Sample) => sample), hasSubflavors: {} };

function buildTask(task: TaskConfiguration, images: Images, remark: Remark): TaskEncoder {
	if (task.kind === "vision-language") {
		const tokenizer = task.tokenizer === null ? byteTokenizer : configuredTokenizer(task.tokenizer);
		return buildVisionLanguageTask(task, tokenizer, images, remark);
	}
	return {
		decode: task.kind === "raw" ? null : { images: (bytes) => images.decode(bytes) },
		cookers: [asItIs],
		batch: collect,
	};
}

/**
 * The settings of a task that determine the stream: the content of tokenizer and chat template without their paths, and without
 * the half of the data that is delivered. The work of images follows from the model. A bound of patches that is not set is left out, as
 * states of earlier versions have no such setting.
 */
function taskIdentity(task: TaskConfiguration): object {
	if (task.kind !== "vision-language") return task;
	const { tokenizer, chat, keep: _, share: __, imageWork: ___, mostPatches, ...all } = task;
	const rest = mostPatches === null ? all : { ...all, mostPatches };
	const { text, specialTokens } = chat.template ?? {};
	const named = { ...rest, chat: { ...chat, template: { text, specialTokens } } };
	const content = tokenizer === null ? null : tokenizerIdentity(tokenizer);
	return content === null ? named : { ...named, tokenizer: content };
}
