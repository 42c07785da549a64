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

/**
 * Why a database may have more rows than its bytes hold; null: it has not. A view or computed column can be endless, and so can a
 * table whose pages refer to each other.
 */
function faultOf(database: Database): string | null {
	const [table] = database.query<{ type: string }, []>("SELECT type FROM pragma_table_list('samples')").all();
	if (table === undefined) return "it has no table samples";
	if (table.type !== "table") return `samples is a ${table.type}, not a table`;
	const computed = database
		.query<{ name: string }, []>("SELECT name FROM pragma_table_xinfo('samples') WHERE hidden <> 0")
		.get();
	if (computed !== null) return `samples has the computed column ${computed.name}`;
	const check = database.query<{ quick_check: string }, []>("PRAGMA quick_check(1)").get()?.quick_check;
	return check === "ok" ? null : (check?.split("\n").at(-1) ?? "it cannot be checked");
}

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
	const fault = asked(() => faultOf(database));
	if (fault !== null) throw damaged(fault);
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
