/** Sources of rows: each row is a record of named fields, perhaps with image files beside it. */

/** Parts of a data set. */
export const parts = ["train", "val", "test"] as const;
export type Part = (typeof parts)[number];

/** A position in a source, as numbers of the source's own meaning (file, byte, row, …); an empty list is the beginning. */
export type Position = readonly number[];

export interface Row {
	/** File and line, row or sample, for messages. */
	readonly where: string;
	/** Fields by name, or why the row is skipped. */
	readonly fields: Readonly<Record<string, unknown>> | SkippedRow;
	/** Image files that lie beside the record. They replace the images that the record names. Empty for most sources. */
	readonly images: readonly Uint8Array[];
	/** Folder to which image paths of the record are relative. */
	readonly folder: string;
	/** The part of the data set that the source names for the row; null: no part. */
	readonly part: Part | null;
	/** Position after this row. */
	readonly next: Position;
}

/** Why a row does not become a sample: a sentence without a full stop, which messages append to the row's position. */
export class SkippedRow extends Error {
	override readonly name = "SkippedRow";
}

export interface Source {
	/** The input for messages, such as "2 Parquet files". */
	readonly description: string;
	/** Digest of the names, sizes and times of the input's files. */
	readonly identity: string;
	/** Names of the fields of every row; null if rows have different fields. */
	readonly columns: readonly string[] | null;
	/** Rows from a position on. Throws a UserError if the rest of a file cannot be read. */
	rows(from: Position): AsyncIterable<Row> | Iterable<Row>;
}

/** A source that is read synchronously. */
export interface SyncSource extends Source {
	rows(from: Position): Iterable<Row>;
}

// Names of the classes in data sets of Hugging Face: a column of the feature ClassLabel holds their numbers.

/** Names in the order of their numbers, by column. */
export type ClassNames = ReadonlyMap<string, readonly string[]>;

type Fields = Readonly<Record<string, unknown>>;

/** The names in a data set's `features`, as dataset_info.json and the metadata of a Parquet file have them. */
export function classNamesOf(features: unknown): ClassNames {
	if (typeof features !== "object" || features === null) return new Map();
	return new Map(
		Object.entries(features).flatMap(([column, feature]) => {
			const { _type: type, names } = (feature ?? {}) as { readonly _type?: unknown; readonly names?: unknown };
			const named = type === "ClassLabel" && Array.isArray(names) && names.every((name) => typeof name === "string");
			return named ? [[column, names as string[]] as const] : [];
		}),
	);
}

/** The fields of a row with names in the place of numbers; −1 and null are no class. A number without a name skips the row. */
export function withClassNames(fields: Fields, classes: ClassNames): Fields | SkippedRow {
	const named = { ...fields };
	for (const [column, names] of classes) {
		const value = fields[column];
		if (typeof value !== "number" && typeof value !== "bigint") continue;
		const name = names[Number(value)];
		if (name === undefined && Number(value) !== -1) {
			return new SkippedRow(`its class ${value} in the column ${column} has no name: there are ${names.length}`);
		}
		named[column] = name ?? null;
	}
	return named;
}

/** The end of a source's description: which of the columns that are read hold classes. */
export function describeClasses(classes: ClassNames, wanted: readonly string[]): string {
	const columns = [...classes.keys()].filter((column) => wanted.includes(column));
	return columns.length === 0 ? "" : `, with the names of the classes in ${columns.join(", ")}`;
}
