/** Tables: CSV and TSV files, with or without a header line. */
import { createReadStream } from "node:fs";
import { dirname } from "node:path";
import { CsvError, type Info, parse } from "csv-parse";
import { UserError } from "../../../system/errors.ts";
import { InputFile as OpenFile } from "../../../system/input-file.ts";
import { fileError } from "../../../system/system-errors.ts";
import { type InputFile, identityOf } from "../detect.ts";
import { type Position, type Row, SkippedRow, type Source } from "../row.ts";
import { LARGEST_RECORD } from "./json-records.ts";

export interface TableOptions {
	/** False: the names of columns are their numbers, "1", "2", … */
	readonly header: boolean;
	/** Null: a tab in .tsv files, else that of the header line, or a comma. */
	readonly delimiter: string | null;
}

/** Bytes in which a header line is looked for. */
const LONGEST_HEADER = 2 ** 16;

interface Line {
	readonly cells: readonly string[];
	/** Line in which the row begins. */
	readonly line: number;
	/** Byte and line after the row. */
	readonly end: number;
	readonly endLine: number;
}

/** Positions: file, byte, line. */
export async function tableSource(
	files: readonly InputFile[],
	options: TableOptions,
	imageRoot: string | null,
): Promise<Source> {
	const heads = await Promise.all(files.map(({ path }) => headOf(path, options)));
	const columns = heads[0]!.columns;
	const other = heads.findIndex((head) => head.columns.join("\0") !== columns.join("\0"));
	if (other >= 0) {
		throw new UserError(`${files[other]!.path} has other columns than ${files[0]!.path}: import them separately.`);
	}
	return {
		description: files.length === 1 ? "a table" : `${files.length} tables`,
		identity: identityOf(files),
		columns,
		async *rows(from: Position): AsyncGenerator<Row> {
			const [first = 0, byte, line] = from;
			for (let i = first; i < files.length; i++) {
				const { path, part } = files[i]!;
				const head = heads[i]!;
				const begin =
					i === first && byte !== undefined ? { byte, line: line! } : { byte: head.end, line: head.endLine };
				for await (const found of linesOf(path, head.delimiter, begin.byte, begin.line)) {
					const { cells } = found;
					yield {
						where: `${path}, line ${found.line}`,
						fields:
							cells.length === columns.length
								? Object.fromEntries(columns.map((name, column) => [name, cells[column]]))
								: new SkippedRow(`the row has ${cells.length} columns, the header ${columns.length}`),
						images: [],
						folder: imageRoot ?? dirname(path),
						part,
						next: [i, found.end, found.endLine],
					};
				}
			}
		},
	};
}

/** Names of the columns, the character between them, and position of the first row. */
async function headOf(
	path: string,
	options: TableOptions,
): Promise<{ columns: string[]; delimiter: string; end: number; endLine: number }> {
	const delimiter = options.delimiter ?? delimiterOf(path, options);
	for await (const { cells, end, endLine } of linesOf(path, delimiter, 0, 1)) {
		if (!options.header) return { columns: cells.map((_, i) => String(i + 1)), delimiter, end: 0, endLine: 1 };
		const columns = cells.map((name) => name.trim());
		const seen = new Set<string>();
		const twice = columns.find((name) => seen.size === seen.add(name).size);
		if (twice !== undefined) throw new UserError(`${path} has the column ${JSON.stringify(twice)} twice.`);
		return { columns, delimiter, end, endLine };
	}
	throw new UserError(`${path} is empty.`);
}

/** The most frequent of comma, semicolon and tab in the header line, outside of quotation marks; the first of them in a draw. */
function delimiterOf(path: string, { header }: TableOptions): string {
	if (/\.tsv$/i.test(path)) return "\t";
	if (!header) return ",";
	using file = OpenFile.open(path);
	const head = Buffer.from(file.read(0, Math.min(file.size, LONGEST_HEADER))).toString();
	const line = head.replaceAll(/"[^"]*"/g, "").split("\n", 1)[0]!;
	const columns = (delimiter: string) => line.split(delimiter).length;
	return [",", ";", "\t"].reduce((best, other) => (columns(other) > columns(best) ? other : best));
}

async function* linesOf(path: string, delimiter: string, byte: number, firstLine: number): AsyncGenerator<Line> {
	const parser = parse({
		delimiter,
		bom: byte === 0,
		info: true,
		relax_column_count: true,
		skip_empty_lines: true,
		record_delimiter: ["\r\n", "\n"],
		max_record_size: LARGEST_RECORD,
		// TSV cells are not quoted; a quotation mark is an ordinary character.
		quote: delimiter === "\t" ? null : '"',
	});
	const file = createReadStream(path, { start: byte, highWaterMark: 2 ** 20 });
	const text = new TextDecoder("utf-8", { fatal: true });
	file.on("error", (error) => parser.destroy(fileError("read", path, error)));
	file.on("data", (chunk) => {
		try {
			text.decode(chunk as Buffer, { stream: true });
		} catch {
			parser.destroy(new UserError(`${path} is not text in UTF-8: convert it, for example with iconv.`));
		}
	});
	file.pipe(parser);
	try {
		for await (const { record, info } of parser as AsyncIterable<{ record: string[]; info: Info }>) {
			const endLine = firstLine + info.lines;
			const breaks = record.reduce((sum, cell) => sum + (cell.includes("\n") ? cell.split("\n").length - 1 : 0), 0);
			yield { cells: record, line: endLine - 1 - breaks, end: byte + info.bytes, endLine };
		}
	} catch (error) {
		if (!(error instanceof CsvError)) throw error;
		const reason = error.message.replace(/\s+/g, " ").slice(0, 200).replace(/\.$/, "");
		throw new UserError(`${path} is not a table: ${reason}.`);
	} finally {
		file.destroy();
		parser.destroy();
	}
}
