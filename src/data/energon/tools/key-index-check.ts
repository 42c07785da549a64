/** The index by key of a folder against its shards. */
import { type KeyRow, keyRows } from "../format/key-index.ts";
import type { IndexedSample } from "../prepare/shard-index.ts";

/** Goes through an index by key beside the shards, and reports the first difference. */
export class KeyIndexCheck {
	readonly #rows: Generator<KeyRow, void, void>;
	#next: KeyRow | null = null;
	/** A difference was reported: all rows behind it would differ too. */
	#over = false;

	constructor(
		path: string,
		private readonly report: (what: string) => void,
	) {
		this.#rows = keyRows(path);
		this.#advance();
	}

	#advance(): void {
		try {
			const step = this.#rows.next();
			this.#next = step.done ? null : step.value;
		} catch (error) {
			this.#differs((error as Error).message);
		}
	}

	#differs(what: string): void {
		this.#over = true;
		this.#next = null;
		this.report(what);
	}

	/** Shard `number` of `.info.json`, which has these samples; null: they are not known. */
	compare(number: number, name: string, samples: readonly IndexedSample[] | null): void {
		if (samples === null) {
			while (this.#next !== null && this.#next.shard <= number) this.#advance();
			return;
		}
		for (const { key, offset, size } of samples) {
			if (this.#over) return;
			const row = this.#next;
			if (row?.shard !== number || row.key !== key || row.offset !== offset || row.size !== size) {
				this.#differs(`the index by key does not have ${name}/${key} as the tar has it`);
				return;
			}
			this.#advance();
		}
	}

	/** After the last of `shards` shards. */
	end(shards: number): void {
		if (this.#next !== null && this.#next.shard < shards) {
			this.#differs(`the index by key has the sample ${this.#next.key}, which is in no shard`);
		}
		this.#rows.return();
	}
}
