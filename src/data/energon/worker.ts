/**
 * One logical worker: its number, its seeds and generators, and the call numbers that user code sees
 * (docs/spec/energon.md §2.1, §2.2). A rank has `numWorkers` of them, or one when that is 0. Every dataset node of a
 * pipeline shares its worker.
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
	/** Logical workers a rank; 0 = one, whose reported id is 0 on every rank. */
	readonly numWorkers: number;
	readonly seedOffset: number;
	/** Receives failures while iterating. */
	readonly errorHandler: ErrorHandler;
	/** Receives failures while samples are restored by key. */
	readonly restoreErrorHandler: ErrorHandler;
}

/**
 * "exact": a restored loader continues as if it had never stopped. "energon": it repeats the Python package where that
 * deviates (restarts in the middle of a generator, rotated workers in later epochs, seeds remembered by the first call
 * of a process); the reference tests alone use it.
 */
export type Compatibility = "exact" | "energon";

export class Worker implements HookContext {
	/** The generators user code draws from. */
	readonly random: SystemRandom;
	/** Bottom: outputs so far; above: the call number of every running function. */
	readonly #calls: number[] = [0];
	/** Seeds that functions keep from their first call in a process (in Energon a worker is one). */
	readonly #remembered = new Map<object, number>();
	/** Worker whose sample is being restored, when that is not this one. */
	#restoring: number | null = null;

	constructor(
		readonly config: WorkerConfig,
		/** Local logical id, 0 … max(1, numWorkers) - 1. */
		readonly id: number,
		readonly compatibility: Compatibility = "exact",
	) {
		this.random = new SystemRandom(this.seed());
	}

	/** Id among all workers of all ranks, as reported in restore keys. */
	get globalId(): number {
		return this.#restoring ?? this.config.rank * this.config.numWorkers + this.id;
	}

	/** Local id, or that of the worker whose sample is being restored. */
	get localId(): number {
		if (this.#restoring === null || this.config.numWorkers === 0) return this.id;
		return this.#restoring % this.config.numWorkers;
	}

	seed(): number {
		const { numWorkers, rank, seedOffset } = this.config;
		return workerSeed(numWorkers === 0 ? rank : this.globalId, seedOffset);
	}

	/** A generator of its own for a dataset node. All of a worker start from the same seed. */
	generator(): TorchGenerator {
		return new TorchGenerator(this.seed());
	}

	/** Number of the running function's call, unique over the rank's workers. */
	get sampleIndex(): number {
		return this.#calls[this.#calls.length - 1]! * Math.max(1, this.config.numWorkers) + this.localId;
	}

	/** Number of the output being made, unique over the rank's workers. */
	get batchIndex(): number {
		return this.#calls[0]! * Math.max(1, this.config.numWorkers) + this.localId;
	}

	/** The output that is made from now on. */
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

	/** Seed of the running call of `owner`, a function with restored seeds. */
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
