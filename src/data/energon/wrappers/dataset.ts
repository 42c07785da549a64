/**
 * A node of the loading pipeline. `iterate()` starts a pass over its outputs, or resumes a pass that was left before its end. The
 * state of a pipeline is a tree with Energon's class and field names, so that states convert both ways
 * (docs/spec/energon.md §4.1).
 */
import { UserError } from "../../../system/errors.ts";
import { TorchGenerator } from "../random/torch-generator.ts";
import type { RestoreKey } from "../sample.ts";
import type { Worker } from "../worker.ts";

/** A torch generator in a state, which is encoded when the state is written. */
export class GeneratorState {
	constructor(private readonly generator: TorchGenerator) {}

	static of(generator: TorchGenerator): GeneratorState {
		return new GeneratorState(generator.clone());
	}

	static fromBytes(bytes: Uint8Array): GeneratorState {
		return new GeneratorState(TorchGenerator.fromState(bytes));
	}

	get bytes(): Uint8Array {
		return this.generator.state();
	}

	restore(): TorchGenerator {
		return this.generator.clone();
	}
}

export type StateValue =
	| null
	| number
	| string
	| boolean
	| GeneratorState
	| readonly StateValue[]
	| { readonly [name: string]: StateValue };

/** State of a node: its class, its fields and the states of its inner nodes. */
export interface NodeState {
	readonly __class__: string;
	readonly datasets?: readonly NodeState[];
	readonly [name: string]: StateValue | readonly NodeState[] | undefined;
}

export abstract class Dataset<Item> {
	/** Energon's class name, for states and restore keys. */
	abstract readonly className: string;

	constructor(
		readonly worker: Worker,
		readonly inner: readonly Dataset<unknown>[],
	) {}

	/** A pass over the outputs. */
	abstract iterate(): Generator<Item, void, void>;

	/** Number of outputs in a pass of a worker, as far as it is known before. */
	abstract lengthOfWorker(worker: number): number;

	/** Number of outputs in a pass of the rank. */
	lengthOfRank(): number {
		let total = 0;
		for (let w = 0; w < Math.max(1, this.worker.config.numWorkers); w++) total += this.lengthOfWorker(w);
		return total;
	}

	hasSamples(): boolean {
		return this.inner.some((dataset) => dataset.hasSamples());
	}

	/** The node's own fields of the state, with Energon's names. */
	protected abstract ownState(): Readonly<Record<string, StateValue>>;

	/** Fields for exact continuation, which Energon lacks. */
	protected exactState(): Readonly<Record<string, StateValue>> {
		return {};
	}

	protected abstract restoreOwn(fields: StateFields): void;
	/** Resets this node, without its inner nodes, to the beginning. */
	abstract resetOwn(): void;

	save(): NodeState {
		const exact = this.worker.compatibility === "exact" ? this.exactState() : {};
		const own = { __class__: this.className, ...this.ownState(), ...exact };
		return this.inner.length === 0 ? own : { ...own, datasets: this.inner.map((dataset) => dataset.save()) };
	}

	/** Restores a state. Throws a UserError for the state of another pipeline. */
	restore(state: NodeState): void {
		const below = state.datasets ?? [];
		if (state.__class__ !== this.className || below.length !== this.inner.length) {
			throw new UserError(
				`The saved loader state has ${state.__class__} with ${below.length} datasets where this run has ${this.className} with ${this.inner.length}: it was saved with other data settings.`,
			);
		}
		for (const [i, dataset] of this.inner.entries()) dataset.restore(below[i]!);
		this.restoreOwn(new StateFields(state));
	}

	reset(): void {
		for (const dataset of this.inner) dataset.reset();
		this.resetOwn();
	}

	/** The step that prevents outputs from being restored by key; null: they can be restored. */
	restorable(): string | null {
		for (const dataset of this.inner) {
			const reason = dataset.restorable();
			if (reason !== null) return reason;
		}
		return null;
	}

	/** Computes the output of a restore key again. */
	abstract restoreSample(key: RestoreKey): Item;

	/** Splits this node's entry, its class name and `numbers` numbers, from a restore key. */
	protected takeKey(key: RestoreKey, numbers: number): [number[], RestoreKey] {
		const taken = key.slice(1, 1 + numbers);
		if (key[0] !== this.className || taken.length !== numbers || taken.some((n) => typeof n !== "number")) {
			throw new UserError(`The restore key ${JSON.stringify(key)} does not fit ${this.className}.`);
		}
		return [taken as number[], key.slice(1 + numbers)];
	}
}

/** Reads the fields of a node's state; errors name missing fields. */
export class StateFields {
	constructor(private readonly state: NodeState) {}

	#get(name: string): StateValue {
		const value = this.state[name];
		if (value === undefined) {
			throw new UserError(`The saved loader state lacks ${name} of ${this.state.__class__}.`);
		}
		return value as StateValue;
	}

	number(name: string): number {
		const value = this.#get(name);
		if (typeof value !== "number") throw this.#wrong(name, "a number");
		return value;
	}

	numberOrNull(name: string): number | null {
		return this.#get(name) === null ? null : this.number(name);
	}

	list<Item extends StateValue>(name: string): readonly Item[] {
		const value = this.#get(name);
		if (!Array.isArray(value)) throw this.#wrong(name, "a list");
		return value as readonly Item[];
	}

	/** A flag of exact states; false in states of the Python package, which lack it. */
	flag(name: string): boolean {
		return this.state[name] === true;
	}

	/** A number of exact states; 0 in states of the Python package, which lack it. */
	numberOrZero(name: string): number {
		return this.state[name] === undefined ? 0 : this.number(name);
	}

	listOrNull<Item extends StateValue>(name: string): readonly Item[] | null {
		return this.#get(name) === null ? null : this.list<Item>(name);
	}

	keys(name: string): RestoreKey[] {
		return [...this.list(name)] as unknown as RestoreKey[];
	}

	record(name: string): Readonly<Record<string, StateValue>> {
		const value = this.#get(name);
		if (value === null || typeof value !== "object" || Array.isArray(value) || value instanceof GeneratorState) {
			throw this.#wrong(name, "a record");
		}
		return value as Readonly<Record<string, StateValue>>;
	}

	/** A nested node, such as a sample buffer. */
	node(name: string): NodeState {
		return this.record(name) as unknown as NodeState;
	}

	generator(name: string): TorchGenerator {
		const rng = this.record(name).rng;
		if (!(rng instanceof GeneratorState)) throw this.#wrong(name, "a generator state");
		return rng.restore();
	}

	#wrong(name: string, what: string): UserError {
		return new UserError(`${name} of ${this.state.__class__} in the saved loader state is not ${what}.`);
	}
}

/** `_worker_rng` of a state. */
export function generatorField(generator: TorchGenerator): StateValue {
	return { rng: GeneratorState.of(generator) };
}

/** Adds a prefix to an element's restore key. */
export function addKey<Item extends { restoreKey: RestoreKey }>(item: Item, ...prefix: (string | number)[]): Item {
	item.restoreKey = [...prefix, ...item.restoreKey];
	return item;
}
