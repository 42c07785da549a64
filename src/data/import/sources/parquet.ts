/** Parquet files, read a row group at a time. */
import { dirname } from "node:path";
import { type FileMetaData, parquetMetadataAsync, parquetReadObjects } from "hyparquet";
import { UserError } from "../../../system/errors.ts";
import { InputFile as OpenFile } from "../../../system/input-file.ts";
import { type InputFile, identityOf } from "../detect.ts";
import {
	type ClassNames,
	type Columns,
	checkColumns,
	classNamesOf,
	describeClasses,
	type Position,
	type Row,
	type Source,
	wantedColumns,
	withClassNames,
	withoutOthersArguments,
} from "../row.ts";
import { checkPages, compressors, LARGEST_GROUP, viewOf, walkStruct } from "./parquet-pages.ts";

/** Bytes of the largest footer. */
const LARGEST_FOOTER = 2 ** 28;

/** Positions: file, row of the file. */
export async function parquetSource(
	files: readonly InputFile[],
	columns: Columns,
	imageRoot: string | null,
): Promise<Source> {
	const first = await metadataOf(files[0]!.path);
	const there = topColumns(first);
	checkColumns(there, columns, { where: files[0]!.path, imageRoot });
	return {
		description: `${files.length === 1 ? "a Parquet file" : `${files.length} Parquet files`}${describeClasses(classesIn(first), wantedColumns(there, columns))}`,
		identity: identityOf(files),
		columns: there,
		async *rows(from: Position): AsyncGenerator<Row> {
			const [firstFile = 0, firstRow = 0] = from;
			for (let i = firstFile; i < files.length; i++) {
				const { path, part } = files[i]!;
				let row = i === firstFile ? firstRow : 0;
				for await (const fields of parquetRows(path, columns, row)) {
					row++;
					const where = `${path}, row ${row}`;
					yield { where, fields, images: [], folder: imageRoot ?? dirname(path), part, next: [i, row] };
				}
			}
		},
	};
}

/** Rows of a file from row `from` on, with the wanted columns. Throws a UserError for a damaged file. */
async function* parquetRows(path: string, columns: Columns, from: number): AsyncGenerator<Row["fields"]> {
	const metadata = await metadataOf(path);
	const wanted = wantedColumns(topColumns(metadata), columns);
	const classes = classesIn(metadata);
	using file = OpenFile.open(path);
	let begin = 0;
	for (const [number, group] of metadata.row_groups.entries()) {
		const end = begin + Number(group.num_rows);
		if (end <= from) {
			begin = end;
			continue;
		}
		const bytes = group.columns.reduce((sum, { meta_data: chunk }) => {
			const read = chunk !== undefined && wanted.includes(chunk.path_in_schema[0]!);
			return sum + (read ? Number(chunk.total_uncompressed_size) : 0);
		}, 0);
		if (!(bytes <= LARGEST_GROUP)) {
			throw new UserError(
				`${path}: row group ${number} has ${bytes} bytes in the columns to read, more than ${LARGEST_GROUP}: write the file with smaller row groups.`,
			);
		}
		const rowStart = Math.max(begin, from);
		const rows = await understood(path, `row group ${number}`, async () => {
			for (const { meta_data: chunk } of group.columns) {
				if (chunk !== undefined && wanted.includes(chunk.path_in_schema[0]!)) checkPages(file, chunk, metadata.schema);
			}
			return await parquetReadObjects({
				file: bufferOf(file),
				metadata,
				columns: wanted,
				rowStart,
				rowEnd: end,
				compressors,
				// Bytes are not decoded as text, since they may be images.
				utf8: false,
				geoparquet: false,
			});
		});
		if (rows.length !== end - rowStart) {
			throw new UserError(`${path}: row group ${number} has ${rows.length} of ${end - rowStart} rows: it is damaged.`);
		}
		for (const row of rows) yield withClassNames(withoutOthersArguments(row), classes);
		begin = end;
	}
}

/** Names of the classes as the `datasets` package writes them. Metadata that it has not written name none. */
function classesIn({ key_value_metadata: entries }: FileMetaData): ClassNames {
	try {
		const written = entries?.find(({ key }) => key === "huggingface")?.value;
		return classNamesOf(JSON.parse(written ?? "{}").info?.features);
	} catch {
		return new Map();
	}
}

function bufferOf(file: OpenFile) {
	return {
		byteLength: file.size,
		slice: (start: number, end = file.size): ArrayBuffer => {
			const bytes = file.read(start, end - start);
			return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) as ArrayBuffer;
		},
	};
}

async function metadataOf(path: string): Promise<FileMetaData> {
	using file = OpenFile.open(path);
	const metadata = await understood(path, "its description", async () => {
		checkFooter(file);
		return await parquetMetadataAsync(bufferOf(file), { geoparquet: false });
	});
	const isSound = metadata.row_groups.every(({ num_rows: rows, columns }) => {
		const isWhole = columns.every(({ meta_data: chunk }) => Array.isArray(chunk?.path_in_schema));
		return isWhole && rows >= 0n && rows <= 2n ** 31n;
	});
	if (!isSound) throw new UserError(`${path} is damaged: the metadata of a row group is incomplete.`);
	return metadata;
}

/** Throws a RangeError if the footer is damaged. */
function checkFooter(file: OpenFile): void {
	const tail = Buffer.from(file.read(Math.max(0, file.size - 8), Math.min(8, file.size)));
	if (tail.length < 8 || tail.toString("latin1", 4) !== "PAR1") throw new RangeError("it does not end as Parquet does");
	const length = tail.readUInt32LE(0);
	if (length > Math.min(file.size - 8, LARGEST_FOOTER)) throw new RangeError(`it has ${length} bytes`);
	walkStruct(viewOf(file.read(file.size - 8 - length, length)), 0);
}

/** Names of the top-level columns. */
function topColumns({ schema }: FileMetaData): string[] {
	const names: string[] = [];
	let at = 1;
	const skip = (): void => {
		const children = schema[at++]?.num_children ?? 0;
		for (let i = 0; i < children && at < schema.length; i++) skip();
	};
	for (let i = 0; i < (schema[0]?.num_children ?? 0) && at < schema.length; i++) {
		names.push(schema[at]!.name);
		skip();
	}
	return names;
}

/** Converts errors of the reader into UserErrors about the file. */
async function understood<Result>(path: string, what: string, read: () => Promise<Result>): Promise<Result> {
	try {
		return await read();
	} catch (error) {
		if (error instanceof UserError) throw error;
		const reason = String((error as Error).message ?? error)
			.replace(/\s+/g, " ")
			.slice(0, 200)
			.replace(/\.$/, "");
		throw new UserError(`${path} cannot be read as Parquet: of ${what}, ${reason}.`);
	}
}
