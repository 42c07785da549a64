/**
 * Reads `index.sqlite`, the location of samples by key (docs/spec/energon.md §1.4), for joins and `mimo data lint`.
 */
import { Database } from "bun:sqlite";
import { UserError } from "../../../system/errors.ts";

export interface KeyRow {
	/** Number of the shard in `.info.json`. */
	readonly shard: number;
	readonly key: string;
	/** Bytes of the sample in the shard. */
	readonly offset: number;
	readonly size: number;
}

type Columns = [shard: unknown, key: unknown, offset: unknown, size: unknown];

/** Rows in the order of the shards and their samples. Throws a UserError when the file is not such an index. */
export function* keyRows(path: string): Generator<KeyRow, void, void> {
	const damaged = (what: string) =>
		new UserError(
			`${path} is not an index by key: ${what}; \`mimo data prepare FOLDER --tar-index-only\` rebuilds it.`,
		);
	const asked = <Result>(ask: () => Result): Result => {
		try {
			return ask();
		} catch (error) {
			throw damaged((error as Error).message);
		}
	};
	using database = asked(() => new Database(path, { readonly: true }));
	const rows = asked(() =>
		database
			.query<Columns, []>(
				"SELECT tar_file_id AS a, sample_key AS b, byte_offset AS c, byte_size AS d FROM samples ORDER BY tar_file_id, sample_index",
			)
			.iterate(),
	);
	for (let number = 0; ; number++) {
		const step = asked(() => rows.next());
		if (step.done) return;
		const [shard, key, offset, size] = Object.values(step.value as unknown as Record<string, unknown>) as Columns;
		const whole = [shard, offset, size].every((value) => Number.isSafeInteger(value) && (value as number) >= 0);
		if (!whole || typeof key !== "string") throw damaged(`row ${number} is damaged`);
		yield { shard: shard as number, key, offset: offset as number, size: size as number };
	}
}
