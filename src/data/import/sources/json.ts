/** JSON records, in JSONL files or in files with a list. */
import { dirname } from "node:path";
import { parseJsonBytes } from "../../energon/format/python-json.ts";
import type { InputFile } from "../detect.ts";
import { type Position, type Row, SkippedRow, type SyncSource } from "../row.ts";
import { identityOf } from "./identity.ts";
import { type JsonRecord, jsonEntries, jsonForm, jsonLines } from "./json-records.ts";

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
