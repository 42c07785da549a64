/** Holds `size` samples and returns a random sample of them (docs/spec/energon.md §3.4). */

import { UserError } from "../../../system/errors.ts";
import type { TorchGenerator } from "../random/torch-generator.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { Dataset, generatorField, type NodeState, StateFields, type StateValue } from "./dataset.ts";

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

/** The samples of a shuffle buffer, a packer or a batch group. States hold only their restore keys; after a restore the samples are read again when iteration starts (docs/spec/energon.md §4.1). */
export class SampleBuffer<Item extends Keyed> {
	#items: Item[] = [];
	/** Restore keys of samples that are not read yet. */
	#unread: RestoreKey[] | null = null;

	constructor(private readonly source: Dataset<Item>) {}

	/** Reads the samples of a restored state; called when iteration starts. */
	start(): void {
		if (this.#unread === null) return;
		const reason = this.#unread.length > 0 ? this.source.restorable() : null;
		if (reason !== null) {
			throw new UserError(
				`The buffered samples of the saved loader state cannot be read again: ${reason} is not stateless.`,
			);
		}
		this.#items = this.#unread.map((key) => this.source.restoreSample(key));
		this.#unread = null;
	}

	get length(): number {
		return this.#unread?.length ?? this.#items.length;
	}

	push(item: Item): void {
		this.#items.push(item);
	}

	/** Removes and returns element `index`. */
	take(index: number): Item {
		return this.#items.splice(index, 1)[0]!;
	}

	/** Removes and returns the first `count` elements. */
	takeFirst(count: number): Item[] {
		return this.#items.splice(0, count);
	}

	/** The first `count` elements, which stay in the buffer. */
	first(count: number): Item[] {
		return this.#items.slice(0, count);
	}

	state(): { readonly [name: string]: StateValue } {
		const keys = this.#unread ?? this.#items.map((item) => item.restoreKey);
		return { __class__: "SavableSampleBuffer", _restore_keys: keys as StateValue };
	}

	restore(state: NodeState): void {
		this.#items = [];
		this.#unread = new StateFields(state).keys("_restore_keys");
	}
}
