/**
 * Other ranks' work while one is timed: on a processor whose cores the ranks of a host share, caches and memory are
 * shared too, and a rank is slower among others than alone. All begin a step together and end it together, as the
 * collectives of a run hold them: a rank that is done leaves its core to the others.
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import { openWorker } from "../native/worker.ts";

/** A message to a companion. */
export interface CompanionJob {
	readonly configuration: TrainingConfiguration;
	readonly rank: number;
	readonly threads: number;
	/** `CompanionWord`s. */
	readonly words: SharedArrayBuffer;
	/** A double: seconds of its last step. */
	readonly seconds: SharedArrayBuffer;
}

/** Words that a companion shares: the steps it is asked for, -1 to end, and those it has finished. */
export const CompanionWord = { asked: 0, finished: 1 } as const;
/** In `asked`. */
export const askedToEnd = -1;
/** In `finished`: before it is ready for a first step, and after it has ended (or was never able to begin). */
const notReady = -1;
export const gone = 2 ** 31 - 1;

/** Milliseconds between two looks at a companion that starts or ends. */
const lookInterval = 5;

interface Companion {
	readonly worker: Worker;
	readonly rank: number;
	readonly words: Int32Array;
	readonly seconds: Float64Array;
}

export class Company implements AsyncDisposable {
	#steps = 0;

	private constructor(private readonly members: readonly Companion[]) {}

	/** Companions that train as `ranks` of the configuration do; resolves when all are ready. */
	static async open(configuration: TrainingConfiguration, ranks: readonly number[], threads: number): Promise<Company> {
		const members = ranks.map((rank) => {
			const words = new Int32Array(new SharedArrayBuffer(4 * Object.keys(CompanionWord).length));
			const seconds = new Float64Array(new SharedArrayBuffer(8));
			words[CompanionWord.finished] = notReady;
			const worker = openWorker("plan/concurrent-rank-worker");
			const shared = { words: words.buffer, seconds: seconds.buffer };
			worker.postMessage({ configuration, rank, threads, ...shared } satisfies CompanionJob);
			return { worker, rank, words, seconds };
		});
		for (const { words } of members) await until(words, (finished) => finished !== notReady);
		return new Company(members);
	}

	/** Runs `own` while every companion runs a step; its seconds, and each companion's by rank. */
	step(own: () => void): { readonly own: number; readonly companions: ReadonlyMap<number, number> } {
		const steps = ++this.#steps;
		for (const { words } of this.members) ask(words, steps);
		const started = performance.now();
		own();
		const seconds = (performance.now() - started) / 1000;
		for (const { words } of this.members) {
			for (let finished = steps - 1; finished < steps; finished = Atomics.load(words, CompanionWord.finished)) {
				Atomics.wait(words, CompanionWord.finished, finished);
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
	Atomics.store(words, CompanionWord.asked, steps);
	Atomics.notify(words, CompanionWord.asked);
}

async function until(words: Int32Array, reached: (finished: number) => boolean): Promise<void> {
	while (!reached(Atomics.load(words, CompanionWord.finished))) await Bun.sleep(lookInterval);
}
