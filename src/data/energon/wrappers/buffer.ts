/**
 * Samples held back by a shuffle buffer, a packer or a batch group. Only their restore keys are saved; after a restore
 * they are read again when iteration starts (docs/spec/energon.md §4.1).
 */
import { UserError } from "../../../system/errors.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { type Dataset, type NodeState, StateFields, type StateValue } from "./dataset.ts";

export class SampleBuffer<Item extends Keyed> {
	#items: Item[] = [];
	/** Keys of samples that are not read yet. */
	#unread: RestoreKey[] | null = null;

	constructor(private readonly source: Dataset<Item>) {}

	/** Reads the samples that a restored state names; to be called when iteration starts. */
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

	/** Takes element `index` out; later ones move down. */
	take(index: number): Item {
		return this.#items.splice(index, 1)[0]!;
	}

	/** Takes the first `count` elements out. */
	takeFirst(count: number): Item[] {
		return this.#items.splice(0, count);
	}

	/** The first `count` elements, left in place. */
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
