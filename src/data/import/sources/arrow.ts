/** Data sets of `save_to_disk`: Arrow IPC streams, read a record batch at a time. */
import { existsSync } from "node:fs";
import { dirname, join } from "node:path";
import { UserError } from "../../../system/errors.ts";
import { InputFile as OpenFile } from "../../../system/input-file.ts";
import { configLimits, readJsonText } from "../../../system/json.ts";
import { type InputFile, identityOf, jsonIn } from "../detect.ts";
import {
	type ClassNames,
	type Columns,
	checkColumns,
	classNamesOf,
	describeClasses,
	type Position,
	type Row,
	type SyncSource,
	wantedColumns,
	withClassNames,
	withoutOthersArguments,
} from "../row.ts";
import { type ArrowField, batchOf, fieldsOf } from "./arrow-batch.ts";

// Reads tables of flatbuffers, the format of Arrow's message descriptions. Offsets outside of the buffer throw a RangeError.

/** Entries of the longest list. */
const LONGEST_LIST = 100_000;

export class FlatTable {
	readonly #fields: number;
	readonly #size: number;

	constructor(
		readonly view: DataView,
		private readonly at: number,
	) {
		this.#fields = at - view.getInt32(at, true);
		this.#size = view.getUint16(this.#fields, true);
	}

	/** The root table of a buffer. */
	static root(bytes: Uint8Array): FlatTable {
		const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
		return new FlatTable(view, view.getUint32(0, true));
	}

	/** Offset of a field; null if it has its default value. */
	#place(field: number): number | null {
		const entry = 4 + 2 * field;
		if (entry + 2 > this.#size) return null;
		const offset = this.view.getUint16(this.#fields + entry, true);
		return offset === 0 ? null : this.at + offset;
	}

	uint8(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getUint8(place);
	}

	int16(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getInt16(place, true);
	}

	int32(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : this.view.getInt32(place, true);
	}

	/** A 64-bit count or offset. */
	count(field: number): number {
		const place = this.#place(field);
		return place === null ? 0 : countAt(this.view, place);
	}

	has(field: number): boolean {
		return this.#place(field) !== null;
	}

	table(field: number): FlatTable | null {
		const place = this.#place(field);
		return place === null ? null : new FlatTable(this.view, place + this.view.getUint32(place, true));
	}

	string(field: number): string {
		const { begin, length } = this.#list(field, 1, Number.MAX_SAFE_INTEGER);
		return Buffer.from(this.view.buffer, this.view.byteOffset + begin, length).toString("utf8");
	}

	tables(field: number): FlatTable[] {
		const { begin, length } = this.#list(field, 4, LONGEST_LIST);
		return Array.from({ length }, (_, i) => {
			const place = begin + 4 * i;
			return new FlatTable(this.view, place + this.view.getUint32(place, true));
		});
	}

	/** A list of pairs of 64-bit counts. */
	pairs(field: number): (readonly [number, number])[] {
		const { begin, length } = this.#list(field, 16, LONGEST_LIST);
		return Array.from({ length }, (_, i) => [
			countAt(this.view, begin + 16 * i),
			countAt(this.view, begin + 16 * i + 8),
		]);
	}

	#list(field: number, bytes: number, most: number): { readonly begin: number; readonly length: number } {
		const place = this.#place(field);
		if (place === null) return { begin: 0, length: 0 };
		const head = place + this.view.getUint32(place, true);
		const length = this.view.getUint32(head, true);
		if (length > most || head + 4 + length * bytes > this.view.byteLength) {
			throw new RangeError(`a list has ${length} entries`);
		}
		return { begin: head + 4, length };
	}
}

function countAt(view: DataView, place: number): number {
	const value = Number(view.getBigInt64(place, true));
	if (!(Number.isSafeInteger(value) && value >= 0)) throw new RangeError(`a count is ${value}`);
	return value;
}

/** Bytes of the largest record batch, and of the largest description of a message. */
const LARGEST_BATCH = 2 ** 31;
const LARGEST_DESCRIPTION = 2 ** 26;

/** Positions: file, byte of the message, row of the batch, row of the file. */
export function arrowSource(files: readonly InputFile[], columns: Columns, imageRoot: string | null): SyncSource {
	for (const { path } of files) refuseIndices(dirname(path));
	const there = arrowColumns(files[0]!.path);
	checkColumns(there, columns, { where: files[0]!.path, imageRoot });
	const classes = new Map(files.map(({ path }) => [path, classesBeside(path)]));
	const named = describeClasses(classes.get(files[0]!.path)!, wantedColumns(there, columns));
	return {
		description: `a data set of save_to_disk in ${files.length === 1 ? "one file" : `${files.length} files`}${named}`,
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
						fields: withClassNames(withoutOthersArguments(fields), classes.get(path)!),
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

/** Names of the classes in the dataset_info.json of a file's folder. */
function classesBeside(file: string): ClassNames {
	return classNamesOf(jsonIn(join(dirname(file), "dataset_info.json"))?.features);
}

/** Refuses a data set with an index of rows, which old versions of the package write. */
function refuseIndices(folder: string): void {
	const path = join(folder, "state.json");
	if (!existsSync(path)) return;
	const text = readJsonText(path, configLimits);
	let state: unknown;
	try {
		state = JSON.parse(text);
	} catch {
		throw new UserError(`${path} is not JSON.`);
	}
	const indices = (state as { _indices_data_files?: unknown } | null)?._indices_data_files;
	if (Array.isArray(indices) && indices.length > 0) {
		throw new UserError(
			`${folder} selects rows of its files (_indices_data_files): save it again after flatten_indices().`,
		);
	}
}

interface ArrowRow {
	readonly fields: Record<string, unknown>;
	/** First byte of the row's batch, and row of the batch. */
	readonly message: number;
	readonly row: number;
}

/** Rows from the batch at byte `from` on (0: the first batch), without the first `skip` rows of the batch. */
function* arrowRows(path: string, columns: Columns, from: number, skip: number): Generator<ArrowRow, void, void> {
	using file = OpenFile.open(path);
	let fields: readonly ArrowField[] | null = null;
	let names: readonly string[] = [];
	for (const { table, type, begin, body } of messages(file)) {
		if (type === Message.schema) {
			if (fields !== null) throw new UserError(`${path} has two schemas.`);
			fields = understood(path, begin, () => fieldsOf(table));
			names = wantedColumns(namesOf(fields), columns);
		} else if (fields === null) throw new UserError(`${path} begins with no schema.`);
		else if (begin >= from) {
			const known = fields;
			const batch = understood(path, begin, () => batchOf(known, names, table, body()));
			for (let row = begin === from ? skip : 0; row < batch.rows; row++) {
				yield { fields: understood(path, begin, () => batch.row(row)), message: begin, row };
			}
		}
	}
	if (fields === null) throw new UserError(`${path} has no schema: it is not an Arrow stream.`);
}

function arrowColumns(path: string): string[] {
	using file = OpenFile.open(path);
	for (const { table, type, begin } of messages(file)) {
		if (type === Message.schema) return namesOf(understood(path, begin, () => fieldsOf(table)));
	}
	throw new UserError(`${path} has no schema: it is not an Arrow stream.`);
}

const namesOf = (fields: readonly ArrowField[]) => fields.map(({ name }) => name);

/** Arrow's numbers of message types. */
const Message = { schema: 1, batch: 3 } as const;

interface FramedMessage {
	/** First byte of the message. */
	readonly begin: number;
	readonly type: number;
	/** Description of a schema or of a record batch. */
	readonly table: FlatTable;
	readonly body: () => Uint8Array;
}

/** Messages of a stream. */
function* messages(file: OpenFile): Generator<FramedMessage, void, void> {
	const { path } = file;
	const damaged = (at: number, what: string) =>
		new UserError(`${path} is not an Arrow stream: at byte ${at}, ${what}.`);
	// A file of the random-access format has a stream between its magic number and its footer.
	const isFile = file.size >= 8 && Buffer.from(file.read(0, 6)).toString("latin1") === "ARROW1";
	for (let at = isFile ? 8 : 0; at + 8 <= file.size; ) {
		const head = Buffer.from(file.read(at, 8));
		const framed = head.readInt32LE(0) === -1;
		const length = head.readInt32LE(framed ? 4 : 0);
		const prefix = framed ? 8 : 4;
		if (length === 0) return;
		if (length < 0 || length > LARGEST_DESCRIPTION || at + prefix + length > file.size) {
			throw damaged(at, `a message has a description of ${length} bytes`);
		}
		const root = understood(path, at, () => FlatTable.root(file.read(at + prefix, length)));
		const { type, table, bodyLength } = understood(path, at, () => ({
			type: root.uint8(1),
			table: root.table(2),
			bodyLength: root.count(3),
		}));
		if (table === null || (type !== Message.schema && type !== Message.batch)) {
			throw damaged(at, `a message is of kind ${type}, which is not read`);
		}
		const bodyAt = at + prefix + length;
		if (bodyAt + bodyLength > file.size) throw damaged(at, `a message of ${bodyLength} bytes goes beyond the end`);
		if (bodyLength > LARGEST_BATCH) {
			throw damaged(at, `a record batch has ${bodyLength} bytes; at most ${LARGEST_BATCH} are read`);
		}
		yield { begin: at, type, table, body: () => file.read(bodyAt, bodyLength) };
		at = bodyAt + bodyLength;
	}
}

/** Converts errors of the reader into UserErrors about the file. */
function understood<Result>(path: string, begin: number, read: () => Result): Result {
	try {
		return read();
	} catch (error) {
		if (!(error instanceof RangeError)) throw error;
		const reason = error.message.slice(0, 200).replace(/\.$/, "");
		throw new UserError(`${path} cannot be read as Arrow: of the message at byte ${begin}, ${reason}.`);
	}
}
