/**
 * Ranks that train in threads beside the rank that `mimo plan --measure` times. Ranks of one host share caches and memory bandwidth,
 * so a rank is slower among others than alone. All start each step together and wait for the slowest, as collectives make them do.
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import { openWorker } from "../system/worker.ts";

/** The message that starts a thread (concurrent-rank-worker.ts). */
export interface ConcurrentRankJob {
	readonly configuration: TrainingConfiguration;
	readonly rank: number;
	readonly threads: number;
	/** Int32 words at the indices of `SharedWord`. */
	readonly words: SharedArrayBuffer;
	/** A double: seconds of its last step. */
	readonly seconds: SharedArrayBuffer;
}

/** Indices of the words that a thread shares: number of steps requested (`askedToEnd`: terminate), and of steps finished. */
export const SharedWord = { asked: 0, finished: 1 } as const;
/** Value of `asked` that ends the thread. */
export const askedToEnd = -1;
/** Value of `finished` before the thread is ready for its first step. */
const notReady = -1;
/** Value of `finished` after the thread has ended, or failed to start. */
export const gone = 2 ** 31 - 1;

/** Milliseconds between polls of a thread that starts or ends. */
const pollInterval = 5;

interface ConcurrentRank {
	readonly worker: Worker;
	readonly rank: number;
	readonly words: Int32Array;
	readonly seconds: Float64Array;
}

export class ConcurrentRanks implements AsyncDisposable {
	#steps = 0;

	private constructor(private readonly members: readonly ConcurrentRank[]) {}

	/** Starts a thread for each of `ranks` of the configuration; resolves when all are ready. */
	static async open(
		configuration: TrainingConfiguration,
		ranks: readonly number[],
		threads: number,
	): Promise<ConcurrentRanks> {
		const members = ranks.map((rank) => {
			const words = new Int32Array(new SharedArrayBuffer(4 * Object.keys(SharedWord).length));
			const seconds = new Float64Array(new SharedArrayBuffer(8));
			words[SharedWord.finished] = notReady;
			const worker = openWorker("plan/concurrent-rank-worker");
			const shared = { words: words.buffer, seconds: seconds.buffer };
			worker.postMessage({ configuration, rank, threads, ...shared } satisfies ConcurrentRankJob);
			return { worker, rank, words, seconds };
		});
		for (const { words } of members) await until(words, (finished) => finished !== notReady);
		return new ConcurrentRanks(members);
	}

	/** Runs `own` while every thread runs a step. Returns the seconds of `own`, and of each thread's step by rank. */
	step(own: () => void): { readonly own: number; readonly companions: ReadonlyMap<number, number> } {
		const steps = ++this.#steps;
		for (const { words } of this.members) ask(words, steps);
		const started = performance.now();
		own();
		const seconds = (performance.now() - started) / 1000;
		for (const { words } of this.members) {
			for (let finished = steps - 1; finished < steps; finished = Atomics.load(words, SharedWord.finished)) {
				Atomics.wait(words, SharedWord.finished, finished);
			}
		}
		return { own: seconds, companions: new Map(this.members.map((one) => [one.rank, one.seconds[0]!])) };
	}

	async [Symbol.asyncDispose](): Promise<void> {
		for (const { words } of this.members) ask(words, askedToEnd);
		for (const { worker, words } of this.members) {
			await until(words, (finished) => finished === gone);
			worker.terminate();
		}
	}
}

function ask(words: Int32Array, steps: number): void {
	Atomics.store(words, SharedWord.asked, steps);
	Atomics.notify(words, SharedWord.asked);
}

async function until(words: Int32Array, reached: (finished: number) => boolean): Promise<void> {
	while (!reached(Atomics.load(words, SharedWord.finished))) await Bun.sleep(pollInterval);
}
