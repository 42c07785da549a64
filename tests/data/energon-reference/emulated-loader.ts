/**
 * The Python package's loader, output for output and state for state, quirks included: torch's data loader hands tasks
 * to worker processes in turn, each worker keeps checkpoints of its past, and a restored loader rotates its workers for
 * good (docs/spec/energon.md §2.3, §4.3). Workers are taken to be fast: a task is done when it is handed out.
 */
import type { Keyed, RestoreKey } from "../../../src/data/energon/sample.ts";
import type { StreamState, WorkerStream } from "../../../src/data/energon/worker.ts";
import { BatchDataset } from "../../../src/data/energon/wrappers/batch.ts";
import type { Dataset } from "../../../src/data/energon/wrappers/dataset.ts";
import { UserError } from "../../../src/system/errors.ts";
import type { RankState, WorkerCheckpoint } from "./python-state.ts";
import { type Parameters, rankStreams, type Setting } from "./setup.ts";

export interface EmulatedOutput {
	readonly item: Keyed;
	/** Logical worker that made it. */
	readonly worker: number;
}

interface Checkpoint {
	readonly state: StreamState | null;
	readonly index: number;
}

interface Cadence {
	/** A checkpoint after every output that is far enough from the last; otherwise only at start and end. */
	readonly often: boolean;
	/** Outputs between checkpoints. */
	readonly distance: number;
	readonly kept: number;
}

/** A worker process: its stream, and the checkpoints it keeps. */
class EmulatedWorker {
	#pass: Generator<Keyed, void, void> | null = null;
	#checkpoints: Checkpoint[] = [{ state: null, index: -1 }];
	/** Outputs to make and throw away first. */
	#skip = 0;
	#restored = false;
	/** The pass has handed nothing out yet. */
	#onlySkipped = true;

	constructor(
		readonly stream: WorkerStream<Keyed>,
		private readonly cadence: Cadence,
	) {}

	restore({ state, offset }: WorkerCheckpoint): void {
		if (state !== null) {
			this.stream.restore(state);
			this.#checkpoints = [{ state: this.stream.save(), index: state.index }];
			this.#restored = true;
		}
		this.#skip = offset;
	}

	/** The next output, or null at the end of a pass. */
	next(): { item: Keyed; index: number } | null {
		if (this.#pass === null) {
			if (!this.#restored) this.#keep(false);
			this.#restored = false;
			this.#pass = this.stream.pass();
			this.#onlySkipped = true;
		}
		for (let outputs = 0; ; outputs++) {
			const step = this.#pass.next();
			if (step.done) {
				if (this.#onlySkipped && outputs > 0) {
					this.#pass = this.stream.pass();
					outputs = -1;
					continue;
				}
				this.#keep(true);
				this.#pass = null;
				return null;
			}
			if (this.#skip > 0) {
				this.#skip--;
				continue;
			}
			this.#onlySkipped = false;
			this.#keep(false);
			return { item: step.value, index: this.stream.index - 1 };
		}
	}

	#keep(always: boolean): void {
		const { often, distance, kept } = this.cadence;
		const { index } = this.stream;
		const last = this.#checkpoints[this.#checkpoints.length - 1]!;
		if (!always && index > 1 && !(often && last.index + distance <= index)) return;
		this.#checkpoints.push({ state: this.stream.save(), index });
		if (this.#checkpoints.length > kept) this.#checkpoints.shift();
	}

	/** The newest checkpoint not beyond output `next`, the first one the consumer has not seen. */
	checkpoint(next: number): WorkerCheckpoint {
		const found = this.#checkpoints.findLast(({ index }) => index <= next);
		if (!found) throw new UserError("The emulated worker keeps no checkpoint that is old enough.");
		return { state: found.state, offset: next - found.index };
	}
}

/** Result of a task: an output, or its worker's error. */
type Result = { readonly item: Keyed; readonly index: number } | { readonly failure: unknown };

export class EmulatedLoader {
	readonly #streams: readonly WorkerStream<Keyed>[];
	readonly #workers: readonly EmulatedWorker[];
	readonly #parameters: Parameters;
	readonly #prefetch: number;
	/** Last output of every logical worker that the consumer has seen. */
	#seen: number[];
	#nextWorker = 0;
	/** Logical worker of physical worker 0. */
	#rotation = 0;
	#restored: RankState | null = null;
	#running = false;
	/** Workers have been started; they live on between passes. */
	#hasWorkers = false;
	/** Tasks in order, each with the physical worker it went to and its result. */
	#tasks: { physical: number; result: Result }[] = [];
	#live: boolean[] = [];
	#nextTask = 0;

	constructor(setting: Setting, dataset: string, parameters: Parameters, rank: number) {
		this.#parameters = parameters;
		this.#streams = rankStreams(setting, dataset, parameters, rank);
		const { num_workers: workers, prefetch_factor: prefetch = 2 } = parameters;
		const processes = Math.max(1, workers);
		this.#prefetch = prefetch;
		const kept = parameters.n_checkpoints ?? prefetch * processes + 1;
		if (kept < prefetch * processes + 1) {
			throw new UserError(
				`n_checkpoints is ${kept}; with prefetch_factor ${prefetch} it must be ${prefetch * processes + 1}.`,
			);
		}
		const cadence: Cadence = {
			often: (parameters.checkpoint_every_sec ?? 60) === 0,
			distance: parameters.checkpoint_every_min_n_samples ?? 2 * workers,
			kept,
		};
		this.#workers = this.#streams.map((stream) => new EmulatedWorker(stream, cadence));
		this.#seen = this.#streams.map(() => -1);
	}

	/** Length of a pass of the rank, as Energon reports it. */
	get length(): number {
		return this.#streams[0]!.dataset.lengthOfRank();
	}

	/** The next output, or null at the end of a pass. */
	next(): EmulatedOutput | null {
		return this.#parameters.num_workers === 0 ? this.#nextInProcess() : this.#nextFromWorkers();
	}

	#pass: Generator<Keyed, void, void> | null = null;

	#nextInProcess(): EmulatedOutput | null {
		this.#pass ??= this.#streams[0]!.pass();
		const step = this.#pass.next();
		if (!step.done) return { item: step.value, worker: 0 };
		this.#pass = null;
		return null;
	}

	#nextFromWorkers(): EmulatedOutput | null {
		const workers = this.#workers.length;
		if (!this.#running) {
			this.#running = true;
			this.#hasWorkers = true;
			this.#live = this.#workers.map(() => true);
			this.#nextTask = 0;
			for (let i = 0; i < this.#prefetch * workers; i++) this.#handOut();
		}
		for (;;) {
			const task = this.#tasks.shift();
			if (task === undefined) {
				this.#running = false;
				this.#nextWorker = 0;
				return null;
			}
			if ("failure" in task.result) throw task.result.failure;
			this.#handOut();
			const worker = this.#logical(task.physical);
			this.#seen[worker] = task.result.index;
			this.#nextWorker = (worker + 1) % workers;
			return { item: task.result.item, worker };
		}
	}

	#logical(physical: number): number {
		return (physical + this.#rotation) % this.#workers.length;
	}

	/** Gives a task to the next live worker in turn. */
	#handOut(): void {
		for (let tried = 0; tried < this.#workers.length; tried++) {
			const physical = this.#nextTask;
			this.#nextTask = (physical + 1) % this.#workers.length;
			if (!this.#live[physical]) continue;
			const result = this.#attempt(physical);
			if (result === null) {
				this.#live[physical] = false;
				continue;
			}
			this.#tasks.push({ physical, result });
			return;
		}
	}

	#attempt(physical: number): Result | null {
		try {
			return this.#workers[this.#logical(physical)]!.next();
		} catch (failure) {
			return { failure };
		}
	}

	/** State of the rank; null when workers have never run. */
	save(): RankState | null {
		const microBatchSize = batchSizeOf(this.#streams[0]!.dataset);
		if (this.#parameters.num_workers === 0) {
			// Without workers the process's own generators are not saved.
			const state = { ...this.#streams[0]!.save(), simple: true };
			return { workers: [{ state, offset: 0 }], nextWorker: 0, microBatchSize };
		}
		if (!this.#hasWorkers) return this.#restored === null ? null : { ...this.#restored, microBatchSize };
		const workers = this.#workers.map((worker, i) => worker.checkpoint(this.#seen[i]! + 1));
		return { workers, nextWorker: this.#nextWorker, microBatchSize };
	}

	#restoredIndex(worker: number): number {
		const state = this.#restored?.workers[worker]?.state;
		return state ? state.index - 1 : -1;
	}

	/** Takes over a state as Energon does, with its refusals. */
	restore(state: RankState | null): void {
		if (this.#hasWorkers) throw new UserError("The emulated loader's workers run; it cannot be restored.");
		if (state === null) return;
		const before = state.microBatchSize;
		const now = batchSizeOf(this.#streams[0]!.dataset);
		if (this.#parameters.num_workers === 0) {
			if (before !== now) throw new UserError("Without workers the micro-batch size cannot change.");
			if (state.workers.length !== 1 || !state.workers[0]!.state?.simple) {
				throw new UserError("The state was saved with workers.");
			}
			this.#streams[0]!.restore(state.workers[0]!.state);
			this.#pass = null;
			return;
		}
		if (state.workers.length !== this.#workers.length || state.workers.some(({ state: s }) => s?.simple)) {
			throw new UserError(`The state has ${state.workers.length} workers, this loader ${this.#workers.length}.`);
		}
		const ratio = batchRatio(before, now);
		const workers = state.workers.map(({ state: inner, offset }) => ({ state: inner, offset: offset * ratio }));
		for (const [i, worker] of this.#workers.entries()) worker.restore(workers[i]!);
		this.#restored = { ...state, workers };
		this.#rotation = state.nextWorker;
		this.#nextWorker = state.nextWorker;
		this.#seen = this.#streams.map((_, i) => this.#restoredIndex(i));
	}

	/** Makes single outputs again, in the main process. */
	restoreSample(key: RestoreKey): Keyed {
		return this.#streams[0]!.restoreSample(key);
	}
}

/** Batch size of the batch node nearest the output, or null. */
function batchSizeOf(dataset: Dataset<unknown>): number | null {
	if (dataset instanceof BatchDataset) return dataset.batchSize;
	for (const inner of dataset.inner) {
		const size = batchSizeOf(inner);
		if (size !== null) return size;
	}
	return null;
}

/** How many batches of the new size make one of the old. */
function batchRatio(before: number | null, now: number | null): number {
	if (before === now) return 1;
	if (before === null || now === null) throw new UserError("A state with batches does not fit a loader without.");
	if (now > before) throw new UserError(`The micro-batch size may not grow from ${before} to ${now}.`);
	if (before % now !== 0)
		throw new UserError(`The micro-batch size ${before} cannot become ${now}, which does not divide it.`);
	return before / now;
}
