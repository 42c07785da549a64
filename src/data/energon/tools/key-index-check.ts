/** Checks the index by key of a folder against its shards. */
import { type KeyRow, keyRows } from "../format/key-index.ts";
import type { IndexedSample } from "../prepare/shard-index.ts";

/** Compares an index by key with the shards in order, and reports the first difference. */
export class KeyIndexCheck {
	readonly #rows: Generator<KeyRow, void, void>;
	#next: KeyRow | null = null;
	/** Whether a difference was reported; further rows are not compared, since they would differ too. */
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

	/** Compares shard `number` of `.info.json` with the index. `samples` null: the samples are unknown. */
	compare(number: number, name: string, samples: readonly IndexedSample[] | null): void {
		if (samples === null) {
			while (this.#next !== null && this.#next.shard <= number) this.#advance();
			return;
		}
		for (const { key, offset, size } of samples) {
			if (this.#over) return;
			const row = this.#next;
			if (row?.shard !== number || row.key !== key || row.offset !== offset || row.size !== size) {
				this.#differs(`the index by key differs from the tar at ${name}/${key}`);
				return;
			}
			this.#advance();
		}
	}

	/** Ends the comparison after `shards` shards: the index may not have further rows. */
	end(shards: number): void {
		if (this.#next !== null && this.#next.shard < shards) {
			this.#differs(`the index by key has the sample ${this.#next.key}, which is in no shard`);
		}
		this.#rows.return();
	}
}
