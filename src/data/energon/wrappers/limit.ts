/**
 * Repeats a dataset, endlessly or a number of times that may be fractional, or ends its passes after a number of outputs
 * (docs/spec/energon.md §3.4).
 */
import { FatalSampleError } from "../errors.ts";
import type { RestoreKey } from "../sample.ts";
import type { WorkerConfig } from "../worker.ts";
import { Dataset, type StateFields, type StateValue } from "./dataset.ts";

export class RepeatDataset<Item> extends Dataset<Item> {
	readonly className = "RepeatDataset";
	readonly #source: Dataset<Item>;
	readonly #repetitions: number | null;
	#repetition = 0;
	/** Number of outputs of the current repetition. */
	#index = 0;

	/** `repetitions` null = endless. */
	constructor(source: Dataset<Item>, repetitions: number | null) {
		super(source.worker, [source]);
		this.#source = source;
		this.#repetitions = repetitions;
	}

	override lengthOfWorker(worker: number): number {
		const length = this.#source.lengthOfWorker(worker);
		return this.#repetitions === null ? length : Math.trunc(length * this.#repetitions);
	}

	override *iterate(): Generator<Item, void, void> {
		const repetitions = this.#repetitions;
		if (repetitions === null && !this.#source.hasSamples()) {
			throw new FatalSampleError(
				`Rank ${this.worker.config.rank}, worker ${this.worker.id} has no samples of a dataset that is repeated endlessly: use fewer ranks or workers.`,
			);
		}
		const length = this.#source.lengthOfWorker(this.worker.id);
		while (repetitions === null || this.#repetition < repetitions) {
			let stopAfter = Number.POSITIVE_INFINITY;
			if (repetitions !== null && this.#repetition === Math.floor(repetitions)) {
				stopAfter = Math.floor(length * (repetitions - Math.floor(repetitions)));
				if (this.#index >= stopAfter) {
					// The state was saved right after the last output. Energon keeps the count, so its next pass is empty.
					if (this.worker.compatibility === "exact") this.#index = 0;
					break;
				}
			}
			for (const item of this.#source.iterate()) {
				this.#index++;
				yield item;
				if (this.#index >= stopAfter) break;
			}
			this.#repetition++;
			this.#index = 0;
		}
		this.#repetition = 0;
	}

	override resetOwn(): void {
		this.#repetition = 0;
		this.#index = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		return { _repetition: this.#repetition, _index: this.#index };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#repetition = fields.number("_repetition");
		this.#index = fields.number("_index");
	}

	override restoreSample(key: RestoreKey): Item {
		return this.#source.restoreSample(key);
	}
}

/** Number of outputs of a worker out of `length` of its rank. */
function quota(length: number, worker: number, { numWorkers }: WorkerConfig): number {
	if (numWorkers <= 1) return length;
	return Math.floor(length / numWorkers) + (worker < length % numWorkers ? 1 : 0);
}

/** Virtual epochs: a pass ends after `length` outputs, and the next pass continues the stream. */
export class EpochizeDataset<Item> extends Dataset<Item> {
	readonly className = "EpochizeDataset";
	readonly #source: Dataset<Item>;
	readonly #length: number;
	/** Number of outputs of this pass so far. */
	#offset = 0;
	/** Whether the stream has ended. */
	#exhausted = false;
	#running: Generator<Item, void, void> | null = null;

	constructor(source: Dataset<Item>, length: number) {
		super(source.worker, [source]);
		this.#source = source;
		this.#length = length;
	}

	override lengthOfWorker(worker: number): number {
		return quota(this.#length, worker, this.worker.config);
	}

	override *iterate(): Generator<Item, void, void> {
		const length = this.lengthOfWorker(this.worker.id);
		while (this.#offset < length && !this.#exhausted) {
			this.#running ??= this.#source.iterate();
			this.#offset++;
			const step = this.#running.next();
			if (step.done) this.#exhausted = true;
			else yield step.value;
		}
		this.#offset = 0;
	}

	override resetOwn(): void {
		this.#offset = 0;
		this.#exhausted = false;
		this.#running = null;
	}

	protected override ownState(): Record<string, StateValue> {
		// Energon does not save that the end of a full pass is still to come: a restored loader continues without it.
		return { _offset: this.#offset % Math.max(1, this.lengthOfWorker(this.worker.id)) };
	}

	protected override exactState(): Record<string, StateValue> {
		return { _offset: this.#offset, _exhausted: this.#exhausted };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#offset = fields.number("_offset");
		this.#exhausted = fields.flag("_exhausted");
	}

	override restoreSample(key: RestoreKey): Item {
		return this.#source.restoreSample(key);
	}
}

/** The first `length` outputs of every pass, after which the inner nodes restart. */
export class LimitDataset<Item> extends Dataset<Item> {
	readonly className = "LimitDataset";
	readonly #source: Dataset<Item>;
	readonly #length: number;
	#offset = 0;

	constructor(source: Dataset<Item>, length: number) {
		super(source.worker, [source]);
		this.#source = source;
		this.#length = length;
	}

	override lengthOfWorker(worker: number): number {
		return quota(this.#length, worker, this.worker.config);
	}

	override lengthOfRank(): number {
		return Math.min(this.#length, this.#source.lengthOfRank());
	}

	override hasSamples(): boolean {
		return this.#length > 0 && super.hasSamples();
	}

	override *iterate(): Generator<Item, void, void> {
		const length = this.lengthOfWorker(this.worker.id);
		for (const item of this.#source.iterate()) {
			// As in Energon a pass computes one output more than it returns, for which functions draw random numbers too.
			if (this.#offset >= length) break;
			this.#offset++;
			yield item;
		}
		this.#source.reset();
		this.#offset = 0;
	}

	override resetOwn(): void {
		this.#offset = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		return { current_offset: this.#offset };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#offset = fields.number("current_offset");
	}

	override restoreSample(key: RestoreKey): Item {
		return this.#source.restoreSample(key);
	}
}
