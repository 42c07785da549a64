/**
 * A configuration while it is resolved. Derived defaults and checks read it like a TrainingConfiguration; a reader of a key that
 * is missing or refused is skipped, so that one mistake is reported once.
 */
import { type Key, propertyOf, type TrainingConfiguration } from "./schema.ts";

const skip = Symbol("missing value");

export class Draft {
	readonly #values = new Map<string, unknown>();
	readonly #view: TrainingConfiguration;

	constructor() {
		this.#view = new Proxy({} as TrainingConfiguration, {
			get: (_, property) => {
				if (!this.#values.has(property as string)) throw skip;
				return this.#values.get(property as string);
			},
			has: (_, property) => this.#values.has(property as string),
		});
	}

	set(key: Key, value: unknown): void {
		this.#values.set(propertyOf(key), value);
	}

	valueOf(key: Key): unknown {
		return this.#values.get(propertyOf(key));
	}

	/** Removes a refused value. */
	refuse(key: Key): void {
		this.#values.delete(propertyOf(key));
	}

	/** Result of `reader`; undefined if a value that it reads is missing. */
	read<Result>(reader: (configuration: TrainingConfiguration) => Result): Result | undefined {
		try {
			return reader(this.#view);
		} catch (error) {
			if (error === skip) return undefined;
			throw error;
		}
	}

	/** Runs `work` without the values of some keys, so that their readers are skipped. */
	without(keys: readonly Key[], work: () => void): void {
		const kept = keys
			.filter((key) => this.#values.has(propertyOf(key)))
			.map((key) => [key, this.valueOf(key)] as const);
		for (const key of keys) this.refuse(key);
		work();
		for (const [key, value] of kept) this.set(key, value);
	}

	/** The finished configuration; only when every key has a value. */
	finish(): TrainingConfiguration {
		return Object.freeze(Object.fromEntries(this.#values)) as unknown as TrainingConfiguration;
	}
}
