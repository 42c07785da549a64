/**
 * A logical worker: its number, its seeds and generators, and the call numbers that user code sees
 * (docs/spec/energon.md §2.1, §2.2). A rank has `numWorkers` workers, or a single worker where that is 0. All nodes of a pipeline
 * share its worker.
 */
import { CryptoHasher } from "bun";
import { UserError } from "../../system/errors.ts";
import type { ErrorHandler } from "./errors.ts";
import { TorchGenerator } from "./random/torch-generator.ts";
import type { Keyed, RestoreKey } from "./sample.ts";
import { addKey, type Dataset, type NodeState } from "./wrappers/dataset.ts";

export interface WorkerConfig {
	/** Data-parallel rank and number of ranks. */
	readonly rank: number;
	readonly worldSize: number;
	/** Logical workers of a rank; 0 = a single worker, whose reported id is 0 on every rank. */
	readonly numWorkers: number;
	readonly seedOffset: number;
	/** Receives failures while iterating. */
	readonly errorHandler: ErrorHandler;
	/** Receives failures while samples are restored by key. */
	readonly restoreErrorHandler: ErrorHandler;
}

/**
 * "exact": a restored loader continues as if it had never stopped. "energon": it deviates as the Python package does (after a
 * restart in a pass, with rotated workers in later epochs); only the reference tests use it.
 */
export type Compatibility = "exact" | "energon";

export class Worker {
	/** Local id of another worker whose sample is being restored; null: no other worker's. */
	#restoring: number | null = null;

	constructor(
		readonly config: WorkerConfig,
		/** Local logical id, 0 … max(1, numWorkers) - 1. */
		readonly id: number,
		readonly compatibility: Compatibility = "exact",
	) {}

	/** Id among all workers of all ranks, which restore keys hold. */
	get globalId(): number {
		return this.#restoring ?? this.config.rank * this.config.numWorkers + this.id;
	}

	seed(): number {
		const { numWorkers, rank, seedOffset } = this.config;
		return workerSeed(numWorkers === 0 ? rank : this.globalId, seedOffset);
	}

	/** A new generator for a dataset node. All generators of a worker start from the same seed. */
	generator(): TorchGenerator {
		return new TorchGenerator(this.seed());
	}

	/** Runs a restore as the given global worker. */
	duringRestore<Result>(globalWorker: number, run: () => Result): Result {
		this.#restoring = globalWorker;
		try {
			return run();
		} finally {
			this.#restoring = null;
		}
	}
}

/** Seed of a global worker: the last four bytes, big endian, of SHA-1("<worker>,<offset>") (docs/spec/energon.md §2.1). */
export function workerSeed(globalWorkerId: number, seedOffset: number): number {
	const digest = new CryptoHasher("sha1").update(`${globalWorkerId},${seedOffset}`).digest();
	return new DataView(digest.buffer, digest.byteOffset, digest.byteLength).getUint32(16, false);
}

/** Class name in the outermost entry of restore keys, for loaders with workers or without. */
export type LoaderClass = "SavableDatasetWrapper" | "SimpleSavableDatasetWrapper";

export interface StreamState {
	/** Number of the next output. */
	readonly index: number;
	readonly dataset: NodeState;
}

export class WorkerStream<Item extends Keyed> {
	#index = 0;

	constructor(
		readonly worker: Worker,
		readonly dataset: Dataset<Item>,
		readonly className: LoaderClass,
	) {}

	/** Number of the next output, counted over all passes. */
	get index(): number {
		return this.#index;
	}

	/** One pass over the data. */
	*pass(): Generator<Item, void, void> {
		for (const item of this.dataset.iterate()) {
			addKey(item, this.className, this.worker.globalId, this.#index);
			this.#index++;
			yield item;
		}
	}

	save(): StreamState {
		return { index: this.#index, dataset: this.dataset.save() };
	}

	restore(state: StreamState): void {
		this.dataset.restore(state.dataset);
		this.#index = state.index;
	}

	/** Computes the output of a restore key again; `key` may be of any worker. */
	restoreSample(key: RestoreKey): Item {
		const [name, globalWorker, index, ...rest] = key;
		if (name !== this.className || typeof globalWorker !== "number" || typeof index !== "number") {
			throw new UserError(`The restore key ${JSON.stringify(key)} does not fit ${this.className}.`);
		}
		return this.worker.duringRestore(globalWorker, () => {
			const item = this.dataset.restoreSample(rest);
			return item === undefined ? item : addKey(item, this.className, globalWorker, index);
		});
	}
}
