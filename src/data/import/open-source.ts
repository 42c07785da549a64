/** Detects the form of the data at paths and opens it as a source of rows. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { INFO_JSON, INFO_YAML, META_FOLDER } from "../energon/format/names.ts";
import { isUrl } from "../energon/storage/storage.ts";
import { type Columns, checkColumns } from "./columns.ts";
import { detect, type ImportKind, type InputFile, importKinds } from "./detect.ts";
import type { Source } from "./row.ts";
import { arrowSource } from "./sources/arrow.ts";
import { jsonSource } from "./sources/json.ts";
import { parquetSource } from "./sources/parquet.ts";
import { pictureSource } from "./sources/pictures.ts";
import { type TableOptions, tableSource } from "./sources/table.ts";
import { tarSource } from "./sources/tars.ts";

export interface SourceOptions {
	readonly paths: readonly string[];
	readonly from: ImportKind | null;
	readonly columns: Columns;
	readonly table: TableOptions;
	readonly imageRoot: string | null;
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
	{ columns, table, imageRoot }: SourceOptions,
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
	}
}
