/** From the parameters of a reference file to pipelines. */
import { defaultLoadOptions, loadDatasets } from "../../../src/data/energon/dataset.ts";
import { type ErrorHandler, raiseError } from "../../../src/data/energon/errors.ts";
import type { ImageDecoder } from "../../../src/data/energon/format/media.ts";
import type { Keyed } from "../../../src/data/energon/sample.ts";
import { resolvePath, type Storage } from "../../../src/data/energon/storage/storage.ts";
import { buildTrain, buildValidation } from "../../../src/data/energon/task-encoder.ts";
import {
	type Compatibility,
	type LoaderClass,
	Worker,
	type WorkerConfig,
	WorkerStream,
} from "../../../src/data/energon/worker.ts";
import type { Dataset } from "../../../src/data/energon/wrappers/dataset.ts";
import { UserError } from "../../../src/system/errors.ts";
import { goldenTask } from "./tasks.ts";

/** `parameters` of a reference file: arguments of Energon's functions, in its names. */
export interface Parameters {
	readonly world_size: number;
	readonly num_workers: number;
	readonly seed_offset?: number;
	readonly task_encoder: string;
	readonly task_encoder_args?: Readonly<Record<string, unknown>>;
	readonly function?: "get_train_dataset" | "get_val_dataset";
	readonly loader?: "get_savable_loader" | "get_loader";
	readonly batch_size?: number | null;
	readonly batch_drop_last?: boolean;
	readonly packing_buffer_size?: number | null;
	readonly shuffle_buffer_size?: number | null;
	readonly max_samples_per_sequence?: number | null;
	readonly virtual_epoch_length?: number;
	readonly shuffle_over_epochs_multiplier?: number | null;
	readonly parallel_shard_iters?: number | null;
	readonly split_part?: string;
	readonly split_config?: string | null;
	readonly dataset_config?: string | null;
	readonly repeat?: boolean;
	readonly limit?: number | null;
	readonly checkpoint_every_sec?: number;
	readonly checkpoint_every_min_n_samples?: number;
	readonly prefetch_factor?: number;
	readonly n_checkpoints?: number;
}

const known = new Set<string>(
	(
		"world_size num_workers seed_offset task_encoder task_encoder_args function loader batch_size batch_drop_last " +
		"packing_buffer_size shuffle_buffer_size max_samples_per_sequence virtual_epoch_length " +
		"shuffle_over_epochs_multiplier parallel_shard_iters split_part split_config dataset_config repeat limit " +
		"checkpoint_every_sec checkpoint_every_min_n_samples prefetch_factor n_checkpoints"
	).split(" "),
);

export interface Setting {
	readonly storage: Storage;
	/** Folder of the reference data; paths in it are relative to it. */
	readonly golden: string;
	/** Decoder of images; null leaves them encoded. */
	readonly images: ImageDecoder | null;
	readonly compatibility: Compatibility;
	readonly errorHandler: ErrorHandler;
	readonly restoreErrorHandler: ErrorHandler;
}

/** Leaves images encoded, drops failing samples silently, as Energon continues. */
export function energonSetting(storage: Storage, golden: string): Setting {
	return {
		storage,
		golden,
		images: null,
		compatibility: "energon",
		errorHandler: () => {},
		restoreErrorHandler: raiseError,
	};
}

/** Builds the pipelines of all logical workers of a rank. */
export function rankStreams(
	setting: Setting,
	dataset: string,
	parameters: Parameters,
	rank: number,
): WorkerStream<Keyed>[] {
	const unknown = Object.keys(parameters).find((name) => !known.has(name));
	if (unknown !== undefined) throw new UserError(`The parameter ${unknown} is not known.`);
	const config: WorkerConfig = {
		rank,
		worldSize: parameters.world_size,
		numWorkers: parameters.num_workers,
		seedOffset: parameters.seed_offset ?? 0,
		errorHandler: setting.errorHandler,
		restoreErrorHandler: setting.restoreErrorHandler,
	};
	const training = (parameters.function ?? "get_train_dataset") === "get_train_dataset";
	const task = goldenTask(parameters.task_encoder, { images: setting.images }, parameters.task_encoder_args);
	const { mode, datasets } = loadDatasets(setting.storage, resolvePath(setting.golden, dataset), task.decode, {
		...defaultLoadOptions,
		training,
		splitPart: parameters.split_part ?? (training ? "train" : "val"),
		shuffleOverEpochsMultiplier:
			parameters.shuffle_over_epochs_multiplier === undefined ? 1 : parameters.shuffle_over_epochs_multiplier,
		maxSamplesPerSequence: parameters.max_samples_per_sequence ?? null,
		parallelShardIters: parameters.parallel_shard_iters ?? null,
		splitConfig: parameters.split_config ?? null,
		datasetConfig: parameters.dataset_config ?? null,
	});
	const batching = {
		batchSize: parameters.batch_size ?? null,
		batchDropLast: parameters.batch_drop_last ?? false,
		packingBufferSize: parameters.packing_buffer_size ?? null,
	};
	const build = (worker: Worker): Dataset<Keyed> =>
		training
			? buildTrain(datasets, task, worker, {
					...batching,
					blendMode: mode,
					repeat: parameters.repeat ?? true,
					shuffleBufferSize: parameters.shuffle_buffer_size ?? null,
					virtualEpochLength: parameters.virtual_epoch_length ?? 0,
				})
			: buildValidation(datasets, task, worker, { ...batching, limit: parameters.limit ?? null });
	const savable = parameters.loader !== "get_loader" && parameters.num_workers > 0;
	const className: LoaderClass = savable ? "SavableDatasetWrapper" : "SimpleSavableDatasetWrapper";
	return Array.from({ length: Math.max(1, parameters.num_workers) }, (_, id) => {
		const worker = new Worker(config, id, setting.compatibility);
		return new WorkerStream(worker, build(worker), className);
	});
}
