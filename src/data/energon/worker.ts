/**
 * A logical worker: its number, its seeds and generators, and the call numbers that user code sees
 * (docs/spec/energon.md §2.1, §2.2). A rank has `numWorkers` workers, or a single worker where that is 0. All nodes of a pipeline
 * share its worker.
 */
import { CryptoHasher } from "bun";
import { UserError } from "../../system/errors.ts";
import type { ErrorHandler } from "./errors.ts";
import type { HookContext } from "./hook.ts";
import { SystemRandom, type SystemRandomState } from "./random/system-random.ts";
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
 * restart in the middle of a generator, with rotated workers in later epochs, with seeds of the first call in a process); only
 * the reference tests use it.
 */
export type Compatibility = "exact" | "energon";

export class Worker implements HookContext {
	/** The generators of user code. */
	readonly random: SystemRandom;
	/** A stack: the number of outputs, then the call number of every running function. */
	readonly #calls: number[] = [0];
	/** Seeds that functions keep from their first call in a process; in Energon each worker is a process. */
	readonly #remembered = new Map<object, number>();
	/** Local id of another worker whose sample is being restored; null: no other worker's. */
	#restoring: number | null = null;

	constructor(
		readonly config: WorkerConfig,
		/** Local logical id, 0 … max(1, numWorkers) - 1. */
		readonly id: number,
		readonly compatibility: Compatibility = "exact",
	) {
		this.random = new SystemRandom(this.seed());
	}

	/** Id among all workers of all ranks, which restore keys hold. */
	get globalId(): number {
		return this.#restoring ?? this.config.rank * this.config.numWorkers + this.id;
	}

	/** Local id, or the local id of the worker whose sample is being restored. */
	get localId(): number {
		if (this.#restoring === null || this.config.numWorkers === 0) return this.id;
		return this.#restoring % this.config.numWorkers;
	}

	seed(): number {
		const { numWorkers, rank, seedOffset } = this.config;
		return workerSeed(numWorkers === 0 ? rank : this.globalId, seedOffset);
	}

	/** A new generator for a dataset node. All generators of a worker start from the same seed. */
	generator(): TorchGenerator {
		return new TorchGenerator(this.seed());
	}

	/** Call number of the running function, unique over the rank's workers. */
	get sampleIndex(): number {
		return this.#calls[this.#calls.length - 1]! * Math.max(1, this.config.numWorkers) + this.localId;
	}

	/** Number of the current output, unique over the rank's workers. */
	get batchIndex(): number {
		return this.#calls[0]! * Math.max(1, this.config.numWorkers) + this.localId;
	}

	/** Begins output number `index`. */
	beginOutput(index: number): void {
		this.#calls.length = 1;
		this.#calls[0] = index;
	}

	/** Runs a function as call number `call`. */
	duringCall<Result>(call: number, run: () => Result): Result {
		this.#calls.push(call);
		try {
			return run();
		} finally {
			this.#calls.pop();
		}
	}

	/** Runs a restore as output `index` of the given global worker. */
	duringRestore<Result>(index: number, globalWorker: number, run: () => Result): Result {
		const saved = [...this.#calls];
		this.#restoring = globalWorker;
		this.beginOutput(index);
		try {
			return run();
		} finally {
			this.#restoring = null;
			this.#calls.splice(0, this.#calls.length, ...saved);
		}
	}

	/** Seed of the running call of `owner`, a function whose seeds are restored. */
	callSeed(owner: object): number {
		let seed = this.seed();
		if (this.compatibility === "energon") {
			const first = this.#remembered.get(owner);
			if (first === undefined) this.#remembered.set(owner, seed);
			else seed = first;
		}
		return callSeed(seed, this.sampleIndex);
	}
}

// The two seeds Energon derives by SHA-1 (docs/spec/energon.md §2.1, §5.3).

function sha1(text: string): DataView {
	const digest = new CryptoHasher("sha1").update(text).digest();
	return new DataView(digest.buffer, digest.byteOffset, digest.byteLength);
}

/** Seed of a global worker: the last four bytes, big endian, of SHA-1("<worker>,<offset>"). */
export function workerSeed(globalWorkerId: number, seedOffset: number): number {
	return sha1(`${globalWorkerId},${seedOffset}`).getUint32(16, false);
}

/** Seed of one call with `restoreSeeds`: the first four bytes, big endian, of SHA-1("<worker seed>|<sample index>"). */
export function callSeed(seedOfWorker: number, sampleIndex: number): number {
	return sha1(`${seedOfWorker}|${sampleIndex}`).getUint32(0, false);
}

/** Class name in the outermost entry of restore keys, for loaders with workers or without. */
export type LoaderClass = "SavableDatasetWrapper" | "SimpleSavableDatasetWrapper";

export interface StreamState {
	/** Number of the next output. */
	readonly index: number;
	readonly dataset: NodeState;
	/** States of the generators of user code; null keeps the present states. */
	readonly random: SystemRandomState | null;
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
		this.worker.beginOutput(this.#index);
		for (const item of this.dataset.iterate()) {
			addKey(item, this.className, this.worker.globalId, this.#index);
			this.#index++;
			yield item;
			this.worker.beginOutput(this.#index);
		}
	}

	save(): StreamState {
		return { index: this.#index, dataset: this.dataset.save(), random: this.worker.random.state() };
	}

	restore(state: StreamState): void {
		this.dataset.restore(state.dataset);
		if (state.random !== null) this.worker.random.restore(state.random);
		this.#index = state.index;
	}

	/** Computes the output of a restore key again; `key` may be of any worker. */
	restoreSample(key: RestoreKey): Item {
		const [name, globalWorker, index, ...rest] = key;
		if (name !== this.className || typeof globalWorker !== "number" || typeof index !== "number") {
			throw new UserError(`The restore key ${JSON.stringify(key)} does not fit ${this.className}.`);
		}
		return this.worker.duringRestore(index, globalWorker, () => {
			const item = this.dataset.restoreSample(rest);
			return item === undefined ? item : addKey(item, this.className, globalWorker, index);
		});
	}
}
