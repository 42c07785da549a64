/** Detects the form of the data at paths and opens it as a source of rows. */
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { INFO_JSON, INFO_YAML, META_FOLDER } from "../energon/format/names.ts";
import { parseJsonBytes } from "../energon/format/python-text.ts";
import { isUrl } from "../energon/storage/storage.ts";
import { detect, type ImportKind, type InputFile, identityOf, importKinds } from "./detect.ts";
import {
	type Columns,
	checkColumns,
	type Position,
	type Row,
	SkippedRow,
	type Source,
	type SyncSource,
} from "./row.ts";
import { arrowSource } from "./sources/arrow.ts";
import { type JsonRecord, jsonEntries, jsonForm, jsonLines } from "./sources/json-records.ts";
import { factoryEntry, factorySource } from "./sources/llama-factory.ts";
import { parquetSource } from "./sources/parquet.ts";
import { pictureSource } from "./sources/pictures.ts";
import { type TableOptions, tableSource } from "./sources/table.ts";
import { tarSource } from "./sources/tars.ts";

export interface SourceOptions {
	/** Files or folders of one form. */
	readonly paths: readonly string[];
	/** Form of the data; null: detected. */
	readonly from: ImportKind | null;
	readonly columns: Columns;
	readonly table: TableOptions;
	/** Folder to which image paths are relative; null: the folder of their file. */
	readonly imageRoot: string | null;
	/** Name of a data set in a LLaMA-Factory folder; null: its only one. */
	readonly dataset: string | null;
}

/** Opens the data at paths. Throws a UserError for paths without data of a known form, or with different forms. */
export async function openSource(
	options: SourceOptions,
): Promise<{ readonly kind: ImportKind; readonly source: Source }> {
	const found = options.paths.map((path) => ({ path, ...detected(path, options.from) }));
	const { kind, path: first } = found[0]!;
	const other = found.find((one) => one.kind !== kind);
	if (other !== undefined) {
		throw new UserError(`${first} is of the form ${kind}, and ${other.path} of ${other.kind}: import them separately.`);
	}
	if (options.dataset !== null && kind !== "llama-factory") {
		throw new UserError(`--dataset ${options.dataset}: ${first} is not ${importKinds["llama-factory"]}.`);
	}
	return {
		kind,
		source: await sourceOf(
			kind,
			found.flatMap(({ files }) => files),
			options,
		),
	};
}

function detected(path: string, from: ImportKind | null): { kind: ImportKind; files: readonly InputFile[] } {
	if (isUrl(path))
		throw new UserError(`${path} is a URL: data are imported from local files; only their images may be at URLs.`);
	if (!existsSync(path)) throw new UserError(`${path} does not exist.`);
	const prepared = [INFO_JSON, INFO_YAML].some((name) => existsSync(join(path, META_FOLDER, name)));
	if (prepared && from === null) {
		throw new UserError(`${path} is an Energon data set already: \`mimo train --data-path ${path}\` reads it.`);
	}
	const found = detect(path, from);
	if (found !== null) return found;
	const forms = Object.entries(importKinds).map(([name, what]) => `${name}: ${what}`);
	const said =
		from === null ? `${path} is not a form of data that can be imported` : `${path} does not hold ${importKinds[from]}`;
	throw new UserError(`${said} (${forms.join("; ")}).`);
}

async function sourceOf(
	kind: ImportKind,
	files: readonly InputFile[],
	{ columns, table, imageRoot, dataset }: SourceOptions,
): Promise<Source> {
	switch (kind) {
		case "pictures": {
			if (files.length > 1) throw new UserError("Folders of pictures cannot be combined: import them separately.");
			return pictureSource(files[0]!.path, imageRoot);
		}
		case "csv": {
			const source = await tableSource(files, table, imageRoot);
			checkColumns(source.columns!, columns, { where: files[0]!.path, imageRoot });
			return source;
		}
		case "json":
			return jsonSource(files, imageRoot);
		case "parquet":
			return await parquetSource(files, columns, imageRoot);
		case "arrow":
			return arrowSource(files, columns, imageRoot);
		case "tar":
			return tarSource(files, imageRoot);
		case "llama-factory": {
			if (files.length > 1) throw new UserError("LLaMA-Factory folders cannot be combined: import them separately.");
			if (Object.values(columns).some((name) => name !== null)) {
				throw new UserError(`${files[0]!.path} names the columns itself: leave out the flags of columns.`);
			}
			return entrySource(files[0]!, dataset, imageRoot);
		}
	}
}

/** The JSON records of a LLaMA-Factory data set. */
function entrySource(info: InputFile, dataset: string | null, imageRoot: string | null): Source {
	const entry = factoryEntry(info.path, dataset);
	if (!existsSync(entry.path)) {
		throw new UserError(`${info.path}: the data set ${entry.name} is in ${entry.path}, which does not exist.`);
	}
	const found = detect(entry.path);
	if (found?.kind !== "json") {
		throw new UserError(
			`${info.path}: the data set ${entry.name} is in ${entry.path}, which does not hold ${importKinds.json}: import it alone.`,
		);
	}
	const source = jsonSource(found.files, imageRoot ?? dirname(info.path));
	return factorySource(source, identityOf([info, ...found.files]), entry);
}

/** Positions: file, byte, line. */
export function jsonSource(files: readonly InputFile[], imageRoot: string | null): SyncSource {
	return {
		description: files.length === 1 ? "JSON records" : `JSON records in ${files.length} files`,
		identity: identityOf(files),
		columns: null,
		*rows(from: Position): Generator<Row> {
			const [first = 0, byte = 0, line = 1] = from;
			for (let i = first; i < files.length; i++) {
				const { path, part } = files[i]!;
				const begin = i === first ? ([byte, line] as const) : ([0, 1] as const);
				const records = jsonForm(path) === "list" ? jsonEntries(path, ...begin) : jsonLines(path, ...begin);
				for (const record of records) {
					yield {
						where: `${path}, line ${record.line}`,
						fields: fieldsOf(record),
						images: [],
						folder: imageRoot ?? dirname(path),
						part,
						next: [i, record.end, record.endLine],
					};
				}
			}
		},
	};
}

function fieldsOf({ bytes }: JsonRecord): Record<string, unknown> | SkippedRow {
	if (bytes === null) return new SkippedRow("the record is longer than 64 MiB");
	let value: unknown;
	try {
		value = parseJsonBytes(bytes);
	} catch (error) {
		return new SkippedRow(`the record is not JSON (${(error as Error).message.slice(0, 200).replace(/\.$/, "")})`);
	}
	if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as Record<string, unknown>;
	return new SkippedRow("the record is not a JSON object");
}
