/** Data sets that `save_to_disk` wrote: Arrow IPC streams, a record batch at a time. */
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { tableFromIPC } from "@uwdata/flechette";
import { InputFile as OpenFile } from "../../../checkpoint/files.ts";
import { UserError } from "../../../native/errors.ts";
import { type Columns, checkColumns, wantedColumns } from "../columns.ts";
import type { InputFile } from "../detect.ts";
import type { Position, Row, Source } from "../row.ts";
import { identityOf } from "./identity.ts";

/** Bytes of the largest message (a record batch) that is read. */
const LARGEST_MESSAGE = 2 ** 31;

/** Position: file, byte of the message, row of the batch, row of the file. */
export function arrowSource(files: readonly InputFile[], columns: Columns, imageRoot: string | null): Source {
	for (const { path } of files) refuseIndices(dirname(path));
	const there = arrowColumns(files[0]!.path);
	checkColumns(there, columns, files[0]!.path);
	return {
		description: `a data set of save_to_disk in ${files.length === 1 ? "one file" : `${files.length} files`}`,
		identity: identityOf(files),
		columns: there,
		*rows(from: Position): Generator<Row> {
			const [firstFile = 0, byte = 0, skip = 0, before = 0] = from;
			for (let i = firstFile; i < files.length; i++) {
				const { path, part } = files[i]!;
				const begin = i === firstFile ? { byte, skip } : { byte: 0, skip: 0 };
				let number = i === firstFile ? before : 0;
				for (const { fields, message, row } of arrowRows(path, columns, begin.byte, begin.skip)) {
					number++;
					yield {
						where: `${path}, row ${number}`,
						fields,
						images: [],
						folder: imageRoot ?? dirname(path),
						part,
						next: [i, message, row + 1, number],
					};
				}
			}
		},
	};
}

/** A data set that is a choice of rows of its files, which old versions of the package write. */
function refuseIndices(folder: string): void {
	const path = join(folder, "state.json");
	if (!existsSync(path)) return;
	let state: unknown;
	try {
		state = JSON.parse(readFileSync(path, "utf8"));
	} catch {
		throw new UserError(`${path} is no JSON.`);
	}
	const indices = (state as { _indices_data_files?: unknown } | null)?._indices_data_files;
	if (Array.isArray(indices) && indices.length > 0) {
		throw new UserError(`${folder} is a choice of rows (_indices_data_files): save it again after flatten_indices().`);
	}
}

export interface ArrowRow {
	readonly fields: Record<string, unknown>;
	/** Byte that its batch begins with, and its place in the batch. */
	readonly message: number;
	readonly row: number;
}

/** Rows from the batch at byte `from` on, without the first `skip` of it; 0 is the first batch. */
export function* arrowRows(
	path: string,
	columns: Columns,
	from: number,
	skip: number,
): Generator<ArrowRow, void, void> {
	using file = OpenFile.open(path);
	let schema: Uint8Array | null = null;
	let names: string[] = [];
	const dictionaries: Uint8Array[] = [];
	for (const { bytes, type, begin } of messages(file, from)) {
		if (type === Message.schema) {
			if (schema !== null) throw new UserError(`${path} has two schemas.`);
			schema = bytes();
			names = wantedColumns(columnsOf(path, schema), columns);
		} else if (schema === null) throw new UserError(`${path} begins with no schema.`);
		else if (type === Message.dictionary) dictionaries.push(bytes());
		else if (begin >= from) {
			const batch = [schema, ...dictionaries, bytes()];
			const table = understood(path, begin, () => tableFromIPC(batch));
			const read = names.map((name) => [name, table.getChild(name)] as const);
			const first = begin === from ? skip : 0;
			for (let row = first; row < table.numRows; row++) {
				const fields = understood(path, begin, () =>
					Object.fromEntries(read.map(([name, column]) => [name, column.at(row)])),
				);
				yield { fields, message: begin, row };
			}
		}
	}
	if (schema === null) throw new UserError(`${path} is empty.`);
}

function arrowColumns(path: string): string[] {
	using file = OpenFile.open(path);
	for (const { bytes, type } of messages(file, 0)) {
		if (type === Message.schema) return columnsOf(path, bytes());
	}
	throw new UserError(`${path} has no schema.`);
}

function columnsOf(path: string, schema: Uint8Array): string[] {
	return understood(path, 0, () => [...tableFromIPC([schema]).names]);
}

/** Kinds of messages, as Arrow numbers them. */
const Message = { schema: 1, dictionary: 2, batch: 3 } as const;

interface FramedMessage {
	readonly begin: number;
	readonly type: number;
	readonly bytes: () => Uint8Array;
}

/** Messages of a stream; those of record batches that end before byte `from` are passed over. */
function* messages(file: OpenFile, from: number): Generator<FramedMessage, void, void> {
	const { path } = file;
	const damaged = (at: number, what: string) => new UserError(`${path} is no Arrow stream: at byte ${at}, ${what}.`);
	// A file of the random-access format is a stream between a mark and a list of its batches.
	const isFile = file.size >= 8 && Buffer.from(file.read(0, 6)).toString("latin1") === "ARROW1";
	for (let at = isFile ? 8 : 0; at + 8 <= file.size; ) {
		const head = new DataView(file.read(at, 8).slice().buffer);
		const framed = head.getInt32(0, true) === -1;
		const length = head.getInt32(framed ? 4 : 0, true);
		const prefix = framed ? 8 : 4;
		if (length === 0) return;
		if (length < 0 || at + prefix + length > file.size) throw damaged(at, `a message has ${length} bytes`);
		const metadata = file.read(at + prefix, Math.min(length, file.size));
		const { type, bodyLength } = messageHeader(metadata) ?? {};
		if (type === undefined || bodyLength === undefined) throw damaged(at, "there is no message");
		const end = at + prefix + length + bodyLength;
		if (end > file.size) throw damaged(at, `a message of ${bodyLength} bytes goes beyond the end`);
		if (end - at > LARGEST_MESSAGE) {
			throw damaged(at, `a record batch has ${end - at} bytes; at most ${LARGEST_MESSAGE} are read`);
		}
		const begin = at;
		if (type !== Message.schema && type !== Message.dictionary && type !== Message.batch) {
			throw damaged(at, `a message is of kind ${type}, which is not read`);
		}
		if (type !== Message.batch || begin >= from) yield { begin, type, bytes: () => file.read(begin, end - begin) };
		at = end;
	}
}

/** Kind and length of the body in a message's flatbuffer: fields 1 and 3 of its root table; null where it is damaged. */
function messageHeader(bytes: Uint8Array): { readonly type: number; readonly bodyLength: number } | null {
	const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
	try {
		const table = view.getUint32(0, true);
		const vtable = table - view.getInt32(table, true);
		const size = view.getUint16(vtable, true);
		const field = (number: number) => (size > 4 + 2 * number ? view.getUint16(vtable + 4 + 2 * number, true) : 0);
		const [typeAt, lengthAt] = [field(1), field(3)];
		if (typeAt === 0) return null;
		const bodyLength = lengthAt === 0 ? 0 : Number(view.getBigInt64(table + lengthAt, true));
		if (!(Number.isSafeInteger(bodyLength) && bodyLength >= 0)) return null;
		return { type: view.getUint8(table + typeAt), bodyLength };
	} catch (error) {
		if (error instanceof RangeError) return null;
		throw error;
	}
}

function understood<Result>(path: string, begin: number, read: () => Result): Result {
	try {
		return read();
	} catch (error) {
		if (error instanceof UserError) throw error;
		const reason = String((error as Error).message ?? error)
			.replace(/\s+/g, " ")
			.slice(0, 200)
			.replace(/\.$/, "");
		throw new UserError(`${path} cannot be read as Arrow: of the message at byte ${begin}, ${reason}.`);
	}
}
