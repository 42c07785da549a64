/**
 * A logical worker: its number, its seeds and generators, and the call numbers that user code sees
 * (docs/spec/energon.md §2.1, §2.2). A rank has `numWorkers` workers, or a single worker where that is 0. All nodes of a pipeline
 * share its worker.
 */
import type { ErrorHandler } from "./errors.ts";
import type { HookContext } from "./hook.ts";
import { callSeed, workerSeed } from "./random/seeds.ts";
import { SystemRandom } from "./random/system-random.ts";
import { TorchGenerator } from "./random/torch-generator.ts";

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
