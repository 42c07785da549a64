/**
 * Other ranks' work while one is timed: on a processor whose cores the ranks of a host share, caches and memory are shared
 * too, and a rank is slower among others than alone.
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import { openWorker } from "../native/worker.ts";

/** What a companion is sent. */
export interface CompanionJob {
	readonly configuration: TrainingConfiguration;
	readonly rank: number;
	readonly threads: number;
	/** One word: see `CompanionState`. */
	readonly state: SharedArrayBuffer;
}

/** Starting, working, asked to end, ended (or never able to begin). */
export const CompanionState = { starting: 0, working: 1, ending: 2, ended: 3 } as const;

/** Milliseconds between two looks at a companion. */
const lookInterval = 5;

export class Company implements AsyncDisposable {
	private constructor(private readonly members: readonly { readonly worker: Worker; readonly word: Int32Array }[]) {}

	/** Companions that train as `ranks` of the configuration do; resolves when all are at work. */
	static async open(configuration: TrainingConfiguration, ranks: readonly number[], threads: number): Promise<Company> {
		const members = ranks.map((rank) => {
			const state = new SharedArrayBuffer(4);
			const worker = openWorker("plan/company-worker");
			worker.postMessage({ configuration, rank, threads, state } satisfies CompanionJob);
			return { worker, word: new Int32Array(state) };
		});
		for (const { word } of members) await until(word, (state) => state !== CompanionState.starting);
		return new Company(members);
	}

	async [Symbol.asyncDispose](): Promise<void> {
		const { working, ending, ended } = CompanionState;
		for (const { word } of this.members) Atomics.compareExchange(word, 0, working, ending);
		for (const { worker, word } of this.members) {
			await until(word, (state) => state === ended);
			worker.terminate();
		}
	}
}

async function until(word: Int32Array, reached: (state: number) => boolean): Promise<void> {
	while (!reached(Atomics.load(word, 0))) await Bun.sleep(lookInterval);
}
