/** Batches of consecutive samples (docs/spec/energon.md §5.1). */
import { ErrorContext, FatalSampleError } from "../errors.ts";
import type { Hook } from "../hook.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { Dataset, type StateFields, type StateValue } from "./dataset.ts";
import { restoring } from "./map.ts";

export class BatchDataset<In extends Keyed, Out extends Keyed> extends Dataset<Out> {
	readonly className = "BatchDataset";
	readonly #source: Dataset<In>;
	readonly #batcher: Hook<readonly In[], Out>;
	readonly #errors: ErrorContext;
	#calls = 0;
	/** Whether the last, smaller batch of this pass was returned. */
	#sourceEnded = false;

	constructor(
		source: Dataset<In>,
		readonly batchSize: number,
		batcher: Hook<readonly In[], Out>,
		private readonly dropLast: boolean,
	) {
		super(source.worker, [source]);
		this.#source = source;
		this.#batcher = batcher;
		this.#errors = new ErrorContext(batcher.name, this.worker.config.errorHandler, batcher.tolerance);
	}

	override lengthOfWorker(worker: number): number {
		const samples = this.#source.lengthOfWorker(worker);
		return this.dropLast ? Math.floor(samples / this.batchSize) : Math.ceil(samples / this.batchSize);
	}

	override *iterate(): Generator<Out, void, void> {
		if (!this.#sourceEnded) {
			let batch: In[] = [];
			for (const sample of this.#source.iterate()) {
				batch.push(sample);
				if (batch.length < this.batchSize) continue;
				yield* this.#flush(batch);
				batch = [];
			}
			this.#sourceEnded = true;
			if (batch.length > 0 && !this.dropLast) yield* this.#flush(batch);
		}
		this.#sourceEnded = false;
	}

	*#flush(batch: readonly In[]): Generator<Out, void, void> {
		try {
			const keys = batch.map((sample) => sample.restoreKey);
			const call = this.#calls++;
			const output = this.#batcher.run(batch);
			this.#errors.succeeded();
			output.restoreKey = [this.className, call, ...keys];
			yield output;
		} catch (error) {
			this.#errors.failed(error, batch);
		}
	}

	override resetOwn(): void {
		this.#sourceEnded = false;
		this.#calls = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		// Energon's fields of a function with several outputs for a batch.
		return { _sample_index: this.#calls, _generator_sample_keys: null, _generator_offset: null };
	}

	protected override exactState(): Record<string, StateValue> {
		return { _source_ended: this.#sourceEnded };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#sourceEnded = fields.flag("_source_ended");
		this.#calls = fields.number("_sample_index");
	}

	override restorable(): string | null {
		return this.#batcher.stateless ? super.restorable() : this.#batcher.name;
	}

	override restoreSample(key: RestoreKey): Out {
		if (!this.#batcher.stateless) {
			throw new FatalSampleError(`Batches cannot be restored through ${this.#batcher.name}: it is not stateless.`);
		}
		const [, rest] = this.takeKey(key, 1);
		const keys = rest as readonly RestoreKey[];
		const batch = keys.map((inner) => this.#source.restoreSample(inner));
		return restoring(this.worker.config.restoreErrorHandler, batch, () => {
			const output = this.#batcher.run(batch);
			output.restoreKey = key;
			return output;
		});
	}
}
