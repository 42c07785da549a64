/** The outputs of a logical worker over all passes, and the worker's state. */
import { UserError } from "../../system/errors.ts";
import type { SystemRandomState } from "./random/system-random.ts";
import type { Keyed, RestoreKey } from "./sample.ts";
import type { Worker } from "./worker.ts";
import { addKey, type Dataset, type NodeState } from "./wrappers/dataset.ts";

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
