/** Combines datasets: drawn by weight, or one after the other (docs/spec/energon.md §3.4). */
import { FatalSampleError } from "../errors.ts";
import { cumulative, type TorchGenerator } from "../random/torch-generator.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import type { Worker } from "../worker.ts";
import { addKey, Dataset, generatorField, type StateFields, type StateValue } from "./dataset.ts";

abstract class CombinedDataset<Item extends Keyed> extends Dataset<Item> {
	constructor(
		worker: Worker,
		protected readonly sources: readonly Dataset<Item>[],
	) {
		super(worker, sources);
	}

	override lengthOfWorker(worker: number): number {
		return this.sources.reduce((sum, source) => sum + source.lengthOfWorker(worker), 0);
	}

	override restoreSample(key: RestoreKey): Item {
		const [[index], rest] = this.takeKey(key, 1);
		const source = this.sources[index!];
		if (!source) throw new FatalSampleError(`A restore key names dataset ${index} of ${this.sources.length}.`);
		return addKey(source.restoreSample(rest), this.className, index!);
	}
}

/** Draws the dataset of every output by weight, until all have ended. */
export class BlendDataset<Item extends Keyed> extends CombinedDataset<Item> {
	readonly className = "BlendDataset";
	readonly #weights: readonly number[];
	#generator: TorchGenerator;
	#exhausted: boolean[];

	constructor(worker: Worker, sources: readonly Dataset<Item>[], weights: readonly number[]) {
		super(worker, sources);
		this.#weights = weights;
		this.#generator = worker.generator();
		this.#exhausted = sources.map(() => false);
	}

	override *iterate(): Generator<Item, void, void> {
		for (const [i, weight] of this.#weights.entries()) {
			if (!(weight > 0))
				throw new FatalSampleError(`Dataset ${i} of a blend has weight ${weight}; weights are above 0.`);
		}
		const running: (Generator<Item, void, void> | null)[] = this.sources.map((source, i) => {
			if (source.hasSamples()) return source.iterate();
			this.#exhausted[i] = true;
			return null;
		});
		if (running.every((source) => source === null)) {
			throw new FatalSampleError(
				`Rank ${this.worker.config.rank}, worker ${this.worker.id} has no samples of any blended dataset: use fewer ranks or workers.`,
			);
		}
		const weights = Float32Array.from(this.#weights);
		for (const [i, exhausted] of this.#exhausted.entries()) {
			if (!exhausted) continue;
			weights[i] = 0;
			running[i] = null;
		}
		let sums = cumulative(weights);
		for (;;) {
			const drawn = weights.length === 1 ? 0 : this.#generator.choiceByCumulative(sums);
			const source = running[drawn]!;
			const step = source?.next();
			if (step && !step.done) {
				yield addKey(step.value, this.className, drawn);
				continue;
			}
			running[drawn] = null;
			weights[drawn] = 0;
			sums = cumulative(weights);
			this.#exhausted[drawn] = true;
			if (running.every((other) => other === null)) break;
		}
		this.resetExhausted();
	}

	private resetExhausted(): void {
		this.#exhausted = this.sources.map(() => false);
	}

	override resetOwn(): void {
		this.#generator = this.worker.generator();
		this.resetExhausted();
	}

	protected override ownState(): Record<string, StateValue> {
		return { exhausted: [...this.#exhausted], _worker_rng: generatorField(this.#generator) };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#exhausted = [...fields.list<boolean>("exhausted")];
		this.#generator = fields.generator("_worker_rng");
	}
}

/** One dataset after the other, for validation. */
export class ConcatDataset<Item extends Keyed> extends CombinedDataset<Item> {
	readonly className = "ConcatDataset";
	/** Index of the current dataset; Energon does not save it, and restarts with the first dataset. */
	#current = 0;

	override *iterate(): Generator<Item, void, void> {
		for (; this.#current < this.sources.length; this.#current++) {
			const current = this.#current;
			for (const item of this.sources[current]!.iterate()) yield addKey(item, this.className, current);
		}
		this.#current = 0;
	}

	override resetOwn(): void {
		this.#current = 0;
	}

	protected override ownState(): Record<string, StateValue> {
		return {};
	}

	protected override exactState(): Record<string, StateValue> {
		return { _current: this.#current };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#current = fields.numberOrZero("_current");
	}
}
