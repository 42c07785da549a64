/**
 * The samples of a shuffle buffer, a packer or a batch group. States hold only their restore keys; after a restore the samples
 * are read again when iteration starts (docs/spec/energon.md §4.1).
 */
import { UserError } from "../../../system/errors.ts";
import type { Keyed, RestoreKey } from "../sample.ts";
import { type Dataset, type NodeState, StateFields, type StateValue } from "./dataset.ts";

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
