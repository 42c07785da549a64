/** Names of the classes in data sets of Hugging Face: a column of the feature ClassLabel holds their numbers. */
import { SkippedRow } from "./row.ts";

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
