/**
 * The data loader of a rank, or of several ranks whose data this process needs. Logical workers run in threads ahead of the
 * consumer. The order of their outputs does not depend on the threads' speed; the memory of waiting outputs is bounded; a state
 * that is saved at any moment continues exactly after the last output that the consumer has taken.
 */

import { dataCpus } from "../../../native/affinity.ts";
import { counted } from "../../../system/counted.ts";
import { UserError } from "../../../system/errors.ts";
import { newReadWatch, ReadObserver } from "../../../system/read-watch.ts";
import { openWorker } from "../../../system/worker.ts";
import type { Keyed } from "../sample.ts";
import { defaultTimeout } from "../storage/open.ts";
import { checkConfiguration, type LoaderConfiguration } from "./configuration.ts";
import { SkipLog } from "./skipped.ts";
import { decodePosition, encodePosition, type LoaderState, type WorkerPosition } from "./state.ts";
import type { FromThread, OpenedWorker, SkippedSample, ToThread } from "./thread.ts";
import { Lane, WorkerQueue } from "./worker-queues.ts";

export interface LoaderOptions {
	/** Number of threads, among which the logical workers are divided; null = a thread for each worker. */
	readonly threads: number | null;
	/** Most bytes of waiting outputs and of taken outputs that are not yet freed. */
	readonly memoryBytes: number;
	/** Most bytes of images that the process decodes at the same time, whatever the number of its loaders. */
	readonly decodingBytes: number;
	/** Most outputs by which a worker runs ahead. */
	readonly prefetch: number;
	/** "skip" skips failing samples, up to a budget; "raise" ends the run at the first failure. */
	readonly onFailure: "skip" | "raise";
	/** Most samples that may be skipped. */
	readonly skipBudget: number;
	/** File to list skipped samples in; null: no list. */
	readonly skippedFile: string | null;
	/** Whether this process reports the skipped samples of a data rank, which several processes may read. */
	readonly reportsSkipped: (rank: number) => boolean;
	/** Called for every skipped sample. */
	readonly onSkipped: (skipped: SkippedSample) => void;
	/** Called with a sentence about a sample that is used nevertheless. */
	readonly onRemark: (sentence: string) => void;
	/** Called with the reason if a skipped sample cannot be written to the list. */
	readonly onUnlisted: (sentence: string) => void;
	/** Called when the consumer has waited `stallSeconds` for a worker of a data rank. */
	readonly onStall: (rank: number, worker: number) => void;
	readonly stallSeconds: number;
}

export const defaultLoaderOptions: LoaderOptions = {
	threads: null,
	memoryBytes: 1 << 30,
	decodingBytes: 1 << 30,
	prefetch: 2,
	onFailure: "skip",
	skipBudget: 1000,
	skippedFile: null,
	reportsSkipped: () => true,
	onSkipped: () => {},
	onRemark: () => {},
	onUnlisted: (sentence) => {
		throw new UserError(sentence);
	},
	onStall: () => {},
	stallSeconds: 60,
};

/** The start of a worker: the beginning or a position, and the number of outputs to discard. */
export interface WorkerStart {
	readonly position: WorkerPosition | null;
	readonly skip: number;
}

/** The states from which a loader continues, and the data ranks that it reads. */
export interface LoaderStart {
	/** Data ranks whose outputs it delivers; default: the configuration's rank. */
	readonly ranks?: readonly number[];
	/** The state of each data rank; null = from the beginning. */
	readonly states?: readonly (LoaderState | null)[];
	/** In place of a state: the starts of the workers of a single data rank. */
	readonly starts?: readonly WorkerStart[];
}

export class DataLoader implements AsyncDisposable {
	readonly #configuration: LoaderConfiguration;
	readonly #options: LoaderOptions;
	readonly #threads: Worker[] = [];
	/** Of the reads of local files in the threads, which end the run when they do not return. */
	readonly #reads: ReadObserver[] = [];
	#look: NodeJS.Timeout | null = null;
	readonly #lanes: readonly Lane[];
	readonly #workers: WorkerQueue[] = [];
	readonly #skipLog: SkipLog;
	readonly #positions = new Map<number, PromiseWithResolvers<WorkerPosition>>();
	#settings: Readonly<Record<string, string>> = {};
	#length = 0;
	#requests = 0;
	#waitingBytes = 0;
	#receivedBytes = 0;
	/** Bytes of outputs that the consumer has taken since the last requested garbage collection. */
	#takenBytes = 0;
	/** Bytes of the largest output so far, as which every requested output counts. */
	#largest = 0;
	#failure: Error | null = null;
	/** Rejected with the failure. */
	readonly #failed = Promise.withResolvers<never>();
	/** Wakes the consumer, which waits for a message of a thread. */
	#wake: (() => void) | null = null;

	private constructor(configuration: LoaderConfiguration, options: LoaderOptions, lanes: readonly Lane[]) {
		this.#configuration = configuration;
		this.#options = options;
		this.#failed.promise.catch(() => {});
		this.#lanes = lanes;
		this.#skipLog = new SkipLog(options.skippedFile, options.skipBudget, options.reportsSkipped, options.onUnlisted);
	}

	/** Opens the data set in all threads. Throws a UserError for errors in the data set or the state. */
	static async open(
		configuration: LoaderConfiguration,
		options: Partial<LoaderOptions> & LoaderStart & { readonly state?: LoaderState | null } = {},
	): Promise<DataLoader> {
		const { state, starts, ranks = [configuration.rank], states = ranks.map(() => state ?? null), ...rest } = options;
		for (const rank of ranks) checkConfiguration({ ...configuration, rank });
		const workers = Math.max(1, configuration.numWorkers);
		for (const [i, saved] of states.entries()) {
			if (saved === null || (saved.workers.length === workers && saved.rank === ranks[i])) continue;
			throw new UserError(
				`The loader state is of data rank ${saved.rank} with ${counted(saved.workers.length, "worker")}; this is rank ${ranks[i]} with ${workers}.`,
			);
		}
		const lanes = ranks.map((rank, i) => new Lane(rank, workers, states[i] ?? null));
		const loader = new DataLoader(configuration, { ...defaultLoaderOptions, ...rest }, lanes);
		try {
			const fromStates = states.flatMap((saved) =>
				Array.from({ length: workers }, (_, id): WorkerStart => ({ position: saved?.workers[id] ?? null, skip: 0 })),
			);
			await loader.#start(starts ?? fromStates, states.find((saved) => saved !== null)?.settings ?? null);
		} catch (error) {
			await loader[Symbol.asyncDispose]();
			throw error;
		}
		loader.#ask();
		return loader;
	}

	async #start(starts: readonly WorkerStart[], saved: LoaderState["settings"] | null): Promise<void> {
		const count = Math.min(this.#options.threads ?? starts.length, starts.length);
		const perLane = starts.length / this.#lanes.length;
		const opened: Promise<void>[] = [];
		const { storage } = this.#configuration;
		const timeout = storage.timeoutMilliseconds ?? defaultTimeout;
		for (let t = 0; t < count; t++) {
			const thread = openWorker("data/energon/loader/thread");
			this.#threads.push(thread);
			const watch = newReadWatch();
			this.#reads.push(new ReadObserver(watch, timeout));
			thread.onerror = (event) => this.#fail(new Error(`A data thread ended: ${event.message}`));
			const own = starts.flatMap(({ position, skip }, number): OpenedWorker[] => {
				if (number % count !== t) return [];
				const { rank } = this.#lanes[Math.floor(number / perLane)]!;
				return [{ number, rank, id: number % perLane, position: position && encodePosition(position), skip }];
			});
			opened.push(this.#opened(thread));
			const { onFailure, decodingBytes } = this.#options;
			const configuration = this.#configuration;
			const shared = { configuration, storage, watch, onFailure, decodingBytes, cpus: dataCpus() };
			this.#post(thread, { type: "open", ...shared, workers: own, saved });
		}
		for (const number of starts.keys()) {
			const worker = new WorkerQueue(number, this.#threads[number % count]!);
			this.#workers.push(worker);
			this.#lanes[Math.floor(number / perLane)]!.workers.push(worker);
		}
		this.#look = setInterval(() => this.#complain(), this.#reads[0]!.interval).unref();
		await Promise.race([Promise.all(opened), this.#failed.promise]);
	}

	/** Fails where a thread's read of a local file does not return. */
	#complain(): void {
		for (const reads of this.#reads) {
			const complaint = reads.complaint();
			if (complaint !== null) this.#fail(complaint);
		}
	}

	#opened(thread: Worker): Promise<void> {
		return new Promise((resolve, reject) => {
			thread.onmessage = ({ data }: MessageEvent<FromThread>) => {
				if (data.type === "failed") return reject(errorOf(data));
				if (data.type !== "opened") return this.#receive(data);
				this.#settings = data.settings;
				this.#length = data.length;
				thread.onmessage = ({ data: later }: MessageEvent<FromThread>) => this.#receive(later);
				resolve();
			};
		});
	}

	/** Number of outputs in a pass of the rank, as far as it is known before. */
	get length(): number {
		return this.#length;
	}

	/** Number of skipped samples. */
	get skipped(): number {
		return this.#skipLog.count;
	}

	/** Bytes of waiting outputs. */
	get waitingBytes(): number {
		return this.#waitingBytes;
	}

	/** Bytes of all outputs received from threads. */
	get receivedBytes(): number {
		return this.#receivedBytes;
	}

	/** Bytes of waiting and requested outputs, and of taken ones that are not yet freed. */
	#heldBytes(): number {
		const requested = this.#workers.reduce((sum, { asked }) => sum + asked, 0) * this.#largest;
		return this.#waitingBytes + this.#takenBytes + requested;
	}

	/**
	 * Requests a garbage collection, of some milliseconds, when the memory is full and taken outputs are half of it: the engine
	 * does not count bytes from other threads, and frees used outputs late.
	 */
	#collect(bytes: number): void {
		this.#takenBytes += bytes;
		const { memoryBytes } = this.#options;
		if (this.#takenBytes < memoryBytes / 2 || this.#heldBytes() + this.#largest <= memoryBytes) return;
		this.#takenBytes = 0;
		Bun.gc(true);
	}

	/**
	 * The next output of a data rank (by its index in `ranks`), or null at the end of a pass; the next call begins the next pass.
	 */
	async next(place = 0): Promise<{ readonly item: Keyed; readonly worker: number } | null> {
		const lane = this.#lanes[place]!;
		for (;;) {
			const turn = lane.turns.worker();
			if (turn === null) return null;
			const worker = lane.workers[turn]!;
			while (worker.events.length === 0) {
				if (this.#failure !== null) throw this.#failure;
				this.#ask();
				const { onStall, stallSeconds } = this.#options;
				const timer = setTimeout(() => onStall(lane.rank, turn), stallSeconds * 1000);
				await new Promise<void>((resolve) => {
					this.#wake = resolve;
				});
				clearTimeout(timer);
			}
			const { item, bytes } = worker.events.shift()!;
			worker.taken++;
			this.#waitingBytes -= bytes;
			this.#collect(bytes);
			if (item === null) lane.turns.endedPass();
			else lane.turns.delivered();
			this.#ask();
			if (item === null) continue;
			this.#checkOrigin(item, lane, turn);
			return { item, worker: turn };
		}
	}

	/** Checks that an output is of the expected worker, so that no other samples are trained on unnoticed. */
	#checkOrigin({ restoreKey }: Keyed, { rank }: Lane, worker: number): void {
		const expected = rank * this.#configuration.numWorkers + worker;
		if (restoreKey[1] === expected) return;
		throw new Error(
			`An output of data worker ${JSON.stringify(restoreKey[1])} arrived in place of an output of ${expected}.`,
		);
	}

	/** Requests further outputs as far as memory allows, first of the workers whose turns are next. */
	#ask(): void {
		const { prefetch, memoryBytes } = this.#options;
		let expected = this.#heldBytes();
		// The size of outputs is known after the first output of a worker.
		const depth = this.#largest === 0 ? 1 : prefetch;
		const queues = this.#lanes.map((lane) => lane.following());
		for (let ahead = 1; ahead <= depth; ahead++) {
			for (let place = 0; place < queues[0]!.length; place++) {
				for (const queue of queues) {
					const worker = queue[place]!;
					// An output that a consumer waits for is requested regardless of memory, else the loader would stand
					// still.
					const urgent = place === 0 && worker.has === 0;
					if (worker.has >= ahead || (!urgent && expected + this.#largest > memoryBytes)) continue;
					worker.asked++;
					expected += this.#largest;
					this.#post(worker.thread, { type: "pull", worker: worker.number, needed: worker.taken });
				}
			}
		}
	}

	#receive(message: FromThread): void {
		switch (message.type) {
			case "event": {
				const worker = this.#workers[message.worker]!;
				worker.asked--;
				worker.events.push({ item: message.item as Keyed | null, bytes: message.bytes });
				this.#waitingBytes += message.bytes;
				this.#receivedBytes += message.bytes;
				this.#largest = Math.max(this.#largest, message.bytes);
				break;
			}
			case "position":
				this.#positions.get(message.request)?.resolve(decodePosition(message.position));
				this.#positions.delete(message.request);
				break;
			case "skipped":
				try {
					if (this.#skipLog.add(message.skipped)) this.#options.onSkipped(message.skipped);
				} catch (error) {
					this.#fail(error as Error);
				}
				break;
			case "remark":
				this.#options.onRemark(message.sentence);
				break;
			case "failed":
				this.#fail(errorOf(message));
				break;
		}
		this.#wake?.();
		this.#wake = null;
	}

	#fail(error: Error): void {
		this.#failure ??= error;
		this.#failed.reject(this.#failure);
		for (const { reject } of this.#positions.values()) reject(error);
		this.#positions.clear();
		this.#wake?.();
		this.#wake = null;
	}

	/** A data rank's state after the last output that `next` has returned for it. */
	async save(place = 0): Promise<LoaderState> {
		if (this.#failure !== null) throw this.#failure;
		const lane = this.#lanes[place]!;
		const { next: nextWorker, ended } = lane.turns;
		const workers = await Promise.all(
			lane.workers.map(({ number, thread, taken }) => {
				const request = this.#requests++;
				const answer = Promise.withResolvers<WorkerPosition>();
				this.#positions.set(request, answer);
				this.#post(thread, { type: "position", worker: number, event: taken, request });
				return answer.promise;
			}),
		);
		const { worldSize, numWorkers } = this.#configuration;
		return { settings: this.#settings, rank: lane.rank, worldSize, numWorkers, nextWorker, ended, workers };
	}

	#post(thread: Worker, message: ToThread): void {
		thread.postMessage(message);
	}

	async [Symbol.asyncDispose](): Promise<void> {
		this.#fail(new Error("The data loader was closed."));
		if (this.#look !== null) clearInterval(this.#look);
		for (const thread of this.#threads) thread.terminate();
		this.#threads.length = 0;
	}
}

function errorOf({ sentence, isUserError, stack }: Extract<FromThread, { type: "failed" }>): Error {
	if (isUserError) return new UserError(sentence);
	const error = new Error(sentence);
	error.stack = stack;
	return error;
}
