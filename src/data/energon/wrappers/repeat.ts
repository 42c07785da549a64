/**
 * Repeats a dataset endlessly, or a number of times that may be fractional (docs/spec/energon.md §3.4).
 */
import { FatalSampleError } from "../errors.ts";
import type { RestoreKey } from "../sample.ts";
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
