/**
 * Passes of a given number of outputs, divided among a rank's workers: virtual epochs of a continuing stream, or the first outputs
 * of every pass (docs/spec/energon.md §3.4).
 */
import type { RestoreKey } from "../sample.ts";
import type { WorkerConfig } from "../worker.ts";
import { Dataset, type StateFields, type StateValue } from "./dataset.ts";

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
