/** Rows of a source of any form: each a record of named fields, perhaps with pictures that lie beside it. */

/** Parts of a data set that rows are divided among. */
export const parts = ["train", "val", "test"] as const;
export type Part = (typeof parts)[number];

/** Where reading goes on; the numbers are a source's own (file, byte, row, …). An empty list is the beginning. */
export type Position = readonly number[];

export interface Row {
	/** Names file and line, row or sample in messages. */
	readonly where: string;
	/** Fields by name; or why there are none: the row is skipped. */
	readonly fields: Readonly<Record<string, unknown>> | SkippedRow;
	/** Image files that lie with the row; the record's own names of images do not count then. Empty for most sources. */
	readonly images: readonly Uint8Array[];
	/** Folder that image paths of the record are relative to. */
	readonly folder: string;
	/** The part that the source itself puts the row into; null: it has no parts. */
	readonly part: Part | null;
	/** Behind this row. */
	readonly next: Position;
}

/** Why a row becomes no sample. The sentence has no full stop: it follows the row's place. */
export class SkippedRow extends Error {
	override readonly name = "SkippedRow";
}

export interface Source {
	/** The input in words, such as "2 Parquet files". */
	readonly description: string;
	/** Tells this input from any other: names, sizes and times of its files. */
	readonly identity: string;
	/** Names of the fields that every row has; null where rows differ. */
	readonly columns: readonly string[] | null;
	/** Rows from a position on. Throws a UserError where the rest of a file cannot be read. */
	rows(from: Position): AsyncIterable<Row> | Iterable<Row>;
}

/** A source that waits for nothing. */
export interface SyncSource extends Source {
	rows(from: Position): Iterable<Row>;
}
