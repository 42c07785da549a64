/**
 * The data loader of a rank. Logical workers run in threads ahead of the consumer; their outputs arrive in a fixed
 * order, whatever the threads' speed; memory for outputs that wait is bounded; a state taken at any moment continues
 * exactly after the last output the consumer has taken.
 */
import { UserError } from "../../../native/errors.ts";
import { openWorker } from "../../../native/worker.ts";
import type { Keyed } from "../sample.ts";
import { checkConfiguration, type LoaderConfiguration } from "./configuration.ts";
import type { FromThread, ToThread } from "./messages.ts";
import { SkipLog } from "./skipped.ts";
import { decodePosition, encodePosition, type LoaderState, type WorkerPosition } from "./state.ts";
import { Turns } from "./turns.ts";

export interface LoaderOptions {
	/** Threads; the logical workers are shared out among them. null = one a worker. */
	readonly threads: number | null;
	/** Most bytes of outputs that wait for the consumer. */
	readonly memoryBytes: number;
	/** Most outputs a worker runs ahead. */
	readonly prefetch: number;
	/** "skip" leaves failing samples out, up to a budget; "raise" ends the run at the first. */
	readonly onFailure: "skip" | "raise";
	/** Most samples that may be skipped. */
	readonly skipBudget: number;
	/** File that lists skipped samples, or null. */
	readonly skippedFile: string | null;
}

export const defaultLoaderOptions: LoaderOptions = {
	threads: null,
	memoryBytes: 1 << 30,
	prefetch: 2,
	onFailure: "skip",
	skipBudget: 1000,
	skippedFile: null,
};

interface Event {
	readonly item: Keyed | null;
	readonly bytes: number;
}

/** The loader's side of a logical worker. */
class WorkerQueue {
	/** Events that wait for the consumer. */
	readonly events: Event[] = [];
	/** Events asked for that have not arrived. */
	asked = 0;
	/** Events the consumer has taken. */
	taken = 0;

	constructor(
		readonly id: number,
		readonly thread: Worker,
	) {}
}

/** Where a worker starts: nowhere, or at a position, perhaps making some outputs for nothing first. */
export interface WorkerStart {
	readonly position: WorkerPosition | null;
	readonly skip: number;
}

export class DataLoader implements AsyncDisposable {
	readonly #configuration: LoaderConfiguration;
	readonly #options: LoaderOptions;
	readonly #threads: Worker[] = [];
	readonly #workers: WorkerQueue[] = [];
	readonly #turns: Turns;
	readonly #skipLog: SkipLog;
	readonly #positions = new Map<number, PromiseWithResolvers<WorkerPosition>>();
	#settings: Readonly<Record<string, string>> = {};
	#length = 0;
	#requests = 0;
	#waitingBytes = 0;
	/** Bytes of the largest output so far: what an output that is asked for is taken to need. */
	#largest = 0;
	#failure: Error | null = null;
	/** Calls whoever waits for news of a thread. */
	#wake: (() => void) | null = null;

	private constructor(configuration: LoaderConfiguration, options: LoaderOptions, turns: Turns) {
		this.#configuration = configuration;
		this.#options = options;
		this.#turns = turns;
		this.#skipLog = new SkipLog(options.skippedFile, options.skipBudget);
	}

	/** Opens the data set in all threads. Throws a UserError for anything wrong with it or with the state. */
	static async open(
		configuration: LoaderConfiguration,
		options: Partial<LoaderOptions> & {
			readonly state?: LoaderState | null;
			readonly starts?: readonly WorkerStart[];
		} = {},
	): Promise<DataLoader> {
		checkConfiguration(configuration);
		const { state, starts, ...rest } = options;
		const workers = Math.max(1, configuration.numWorkers);
		if (state && (state.workers.length !== workers || state.rank !== configuration.rank)) {
			throw new UserError(
				`The loader state is of data rank ${state.rank} with ${state.workers.length} workers; this is rank ${configuration.rank} with ${workers}.`,
			);
		}
		const turns = new Turns(workers, state?.nextWorker, state?.ended);
		const loader = new DataLoader(configuration, { ...defaultLoaderOptions, ...rest }, turns);
		try {
			await loader.#start(
				starts ?? Array.from({ length: workers }, (_, id) => ({ position: state?.workers[id] ?? null, skip: 0 })),
				state?.settings ?? null,
			);
		} catch (error) {
			await loader[Symbol.asyncDispose]();
			throw error;
		}
		loader.#ask();
		return loader;
	}

	async #start(starts: readonly WorkerStart[], saved: LoaderState["settings"] | null): Promise<void> {
		const count = Math.min(this.#options.threads ?? starts.length, starts.length);
		const opened: Promise<void>[] = [];
		for (let t = 0; t < count; t++) {
			const thread = openWorker("data/energon/loader/thread");
			this.#threads.push(thread);
			thread.onerror = (event) => this.#fail(new Error(`A data thread ended: ${event.message}`));
			const own = starts.flatMap(({ position, skip }, id) =>
				id % count === t ? [{ id, position: position && encodePosition(position), skip }] : [],
			);
			opened.push(this.#opened(thread));
			const { storage } = this.#configuration;
			const { onFailure } = this.#options;
			const configuration = this.#configuration;
			this.#post(thread, { type: "open", configuration, storage, workers: own, onFailure, saved });
		}
		for (const [id] of starts.entries()) this.#workers.push(new WorkerQueue(id, this.#threads[id % count]!));
		await Promise.all(opened);
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

	/** Outputs of a pass of the rank, as far as known before. */
	get length(): number {
		return this.#length;
	}

	/** Samples skipped so far. */
	get skipped(): number {
		return this.#skipLog.count;
	}

	/** Bytes of outputs that wait now. */
	get waitingBytes(): number {
		return this.#waitingBytes;
	}

	/** The next output, or null at the end of a pass; the pass after it begins with the next call. */
	async next(): Promise<{ readonly item: Keyed; readonly worker: number } | null> {
		for (;;) {
			const turn = this.#turns.worker();
			if (turn === null) return null;
			const worker = this.#workers[turn]!;
			while (worker.events.length === 0) {
				if (this.#failure !== null) throw this.#failure;
				this.#ask();
				await new Promise<void>((resolve) => {
					this.#wake = resolve;
				});
			}
			const { item, bytes } = worker.events.shift()!;
			worker.taken++;
			this.#waitingBytes -= bytes;
			if (item === null) this.#turns.endedPass();
			else this.#turns.delivered();
			this.#ask();
			if (item !== null) return { item, worker: turn };
		}
	}

	/** Asks threads for more, the workers whose turn comes first, as far as memory allows. */
	#ask(): void {
		const { prefetch, memoryBytes } = this.#options;
		let expected = this.#waitingBytes + this.#workers.reduce((sum, { asked }) => sum + asked, 0) * this.#largest;
		// One output each tells how large they are.
		const depth = this.#largest === 0 ? 1 : prefetch;
		for (let ahead = 1; ahead <= depth; ahead++) {
			let first = true;
			for (const id of this.#turns.following()) {
				const worker = this.#workers[id]!;
				const has = worker.events.length + worker.asked;
				// The one the consumer waits for is asked whatever the memory: without it nothing moves.
				const urgent = first && has === 0;
				first = false;
				if (has >= ahead || (!urgent && expected + this.#largest > memoryBytes)) continue;
				worker.asked++;
				expected += this.#largest;
				this.#post(worker.thread, { type: "pull", worker: id, needed: worker.taken });
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
				this.#largest = Math.max(this.#largest, message.bytes);
				break;
			}
			case "position":
				this.#positions.get(message.request)?.resolve(decodePosition(message.position));
				this.#positions.delete(message.request);
				break;
			case "skipped":
				try {
					this.#skipLog.add(message.skipped);
				} catch (error) {
					this.#fail(error as Error);
				}
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
		for (const { reject } of this.#positions.values()) reject(error);
		this.#positions.clear();
		this.#wake?.();
		this.#wake = null;
	}

	/** State after the last output that `next` has returned. */
	async save(): Promise<LoaderState> {
		if (this.#failure !== null) throw this.#failure;
		const { next: nextWorker, ended } = this.#turns;
		const workers = await Promise.all(
			this.#workers.map(({ id, thread, taken }) => {
				const request = this.#requests++;
				const answer = Promise.withResolvers<WorkerPosition>();
				this.#positions.set(request, answer);
				this.#post(thread, { type: "position", worker: id, event: taken, request });
				return answer.promise;
			}),
		);
		const { rank, worldSize, numWorkers } = this.#configuration;
		return { settings: this.#settings, rank, worldSize, numWorkers, nextWorker, ended, workers };
	}

	#post(thread: Worker, message: ToThread): void {
		thread.postMessage(message);
	}

	async [Symbol.asyncDispose](): Promise<void> {
		this.#fail(new Error("The data loader was closed."));
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
