/** Runs all logical workers of a rank in the calling thread, for tests, tools and small data. */

import { type ErrorHandler, raiseError } from "../../src/data/energon/errors.ts";
import {
	checkConfiguration,
	type LoaderConfiguration,
	Pipelines,
} from "../../src/data/energon/loader/configuration.ts";
import { checkSettings, type LoaderState } from "../../src/data/energon/loader/state.ts";
import { EventStream } from "../../src/data/energon/loader/thread.ts";
import { Turns } from "../../src/data/energon/loader/worker-queues.ts";
import type { Keyed } from "../../src/data/energon/sample.ts";
import type { Storage } from "../../src/data/energon/storage/storage.ts";
import type { Images } from "../../src/native/images.ts";

export interface Delivered {
	readonly item: Keyed;
	/** Logical worker of the output. */
	readonly worker: number;
}

export class LocalLoader {
	readonly #configuration: LoaderConfiguration;
	readonly #settings: Readonly<Record<string, string>>;
	readonly #streams: readonly EventStream[];
	readonly #events: number[];
	readonly #turns: Turns;
	/** Number of outputs in a pass of the rank, as far as it is known before. */
	readonly length: number;

	constructor(
		configuration: LoaderConfiguration,
		storage: Storage,
		images: Images,
		options: { readonly state?: LoaderState; readonly errorHandler?: ErrorHandler } = {},
	) {
		checkConfiguration(configuration);
		this.#configuration = configuration;
		const pipelines = new Pipelines(configuration, storage, images);
		this.#settings = pipelines.settings();
		const { state } = options;
		if (state !== undefined) checkSettings(state.settings, this.#settings);
		const workers = Math.max(1, configuration.numWorkers);
		const streams = Array.from({ length: workers }, (_, id) =>
			pipelines.stream(configuration.rank, id, options.errorHandler ?? raiseError),
		);
		this.length = streams[0]!.dataset.lengthOfRank();
		this.#streams = streams.map((stream, id) => new EventStream(stream, state?.workers[id] ?? null));
		this.#events = streams.map(() => 0);
		this.#turns = new Turns(workers, state?.nextWorker, state?.ended);
	}

	/** The next output, or null at the end of a pass. */
	next(): Delivered | null {
		for (;;) {
			const worker = this.#turns.worker();
			if (worker === null) return null;
			const item = this.#streams[worker]!.next();
			this.#events[worker]!++;
			this.#streams[worker]!.forget(this.#events[worker]!);
			if (item === null) {
				this.#turns.endedPass();
				continue;
			}
			this.#turns.delivered();
			return { item, worker };
		}
	}

	/** State after the last output. */
	save(): LoaderState {
		const { rank, worldSize, numWorkers } = this.#configuration;
		return {
			settings: this.#settings,
			rank,
			worldSize,
			numWorkers,
			nextWorker: this.#turns.next,
			ended: this.#turns.ended,
			workers: this.#streams.map((stream, i) => stream.position(this.#events[i]!)),
		};
	}
}
