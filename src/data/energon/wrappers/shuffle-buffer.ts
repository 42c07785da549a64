/** Holds `size` samples and returns a random sample of them (docs/spec/energon.md §3.4). */
import type { TorchGenerator } from "../random/torch-generator.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { SampleBuffer } from "./buffer.ts";
import { Dataset, generatorField, type StateFields, type StateValue } from "./dataset.ts";

export class ShuffleBufferDataset<Item extends Keyed> extends Dataset<Item> {
	readonly className = "ShuffleBufferDataset";
	readonly #source: Dataset<Item>;
	readonly #size: number;
	#generator: TorchGenerator;
	#buffer: SampleBuffer<Item>;
	/** Whether the source has ended, so that only the samples in the buffer remain of this pass. */
	#sourceEnded = false;

	constructor(source: Dataset<Item>, size: number) {
		super(source.worker, [source]);
		this.#source = source;
		this.#size = size;
		this.#generator = this.worker.generator();
		this.#buffer = new SampleBuffer(source);
	}

	override lengthOfWorker(worker: number): number {
		return this.#source.lengthOfWorker(worker);
	}

	override *iterate(): Generator<Item, void, void> {
		this.#buffer.start();
		const source = this.#source.iterate();
		while (!this.#sourceEnded) {
			if (this.#buffer.length < this.#size) {
				const step = source.next();
				if (step.done) this.#sourceEnded = true;
				else this.#buffer.push(step.value);
			} else {
				yield this.#draw();
			}
		}
		while (this.#buffer.length > 0) yield this.#draw();
		this.#sourceEnded = false;
	}

	#draw(): Item {
		return this.#buffer.take(this.#generator.below(this.#buffer.length));
	}

	override resetOwn(): void {
		this.#sourceEnded = false;
		this.#generator = this.worker.generator();
		this.#buffer = new SampleBuffer(this.#source);
	}

	protected override ownState(): Record<string, StateValue> {
		return { _active_buffer: this.#buffer.state(), _worker_rng: generatorField(this.#generator) };
	}

	protected override exactState(): Record<string, StateValue> {
		return { _source_ended: this.#sourceEnded };
	}

	protected override restoreOwn(fields: StateFields): void {
		this.#sourceEnded = fields.flag("_source_ended");
		this.#buffer.restore(fields.node("_active_buffer"));
		this.#generator = fields.generator("_worker_rng");
	}

	override restoreSample(key: RestoreKey): Item {
		return this.#source.restoreSample(key);
	}
}
