/**
 * Reads record batches of Arrow: the fields of a schema, and the values of their columns. Strings, bytes, numbers, booleans, lists
 * and structs are read: Hugging Face data sets consist of these. Other values are null.
 */
import type { FlatTable } from "./arrow.ts";

/** Type numbers of the schema. */
const Type = {
	null: 1,
	int: 2,
	float: 3,
	binary: 4,
	text: 5,
	bool: 6,
	decimal: 7,
	date: 8,
	time: 9,
	timestamp: 10,
	interval: 11,
	list: 12,
	struct: 13,
	fixedBinary: 15,
	fixedList: 16,
	map: 17,
	duration: 18,
	largeBinary: 19,
	largeText: 20,
	largeList: 21,
} as const;

const known: readonly number[] = Object.values(Type);

export interface ArrowField {
	readonly name: string;
	readonly type: number;
	/** Bits of a number; entries or bytes of a fixed-size type. */
	readonly width: number;
	readonly signed: boolean;
	readonly children: readonly ArrowField[];
}

const MOST_FIELDS = 10_000;
const DEEPEST = 32;
/** Most values of a row, and most rows of a batch with fewer bytes. */
const MOST_VALUES = 2 ** 22;
const MOST_EMPTY_ROWS = 2 ** 20;

/** The fields of a schema message's table. Throws a RangeError that names what is not supported. */
export function fieldsOf(schema: FlatTable): ArrowField[] {
	let count = 0;
	const read = (table: FlatTable, depth: number): ArrowField => {
		if (++count > MOST_FIELDS || depth > DEEPEST) throw new RangeError("it has too many fields");
		const name = table.string(0);
		const type = table.uint8(2);
		if (table.has(4)) throw new RangeError(`the column ${name} is a dictionary, which is not read`);
		if (!known.includes(type)) throw new RangeError(`the column ${name} is of type ${type}, which is not read`);
		const details = table.table(3);
		const width = type === Type.float ? 16 << (details?.int16(0) ?? 0) : (details?.int32(0) ?? 0);
		const signed = type !== Type.int || details?.uint8(1) === 1;
		return { name, type, width, signed, children: table.tables(5).map((child) => read(child, depth + 1)) };
	};
	return schema.tables(1).map((table) => read(table, 0));
}

/** Reads the value of a row. */
type Read = (row: number) => unknown;

interface Column {
	readonly length: number;
	readonly read: Read;
}

export interface Batch {
	readonly rows: number;
	/** A row as an object of the wanted columns. */
	row(index: number): Record<string, unknown>;
}

/** The batch of a description and a body. Throws a RangeError where they do not match. */
export function batchOf(
	fields: readonly ArrowField[],
	wanted: readonly string[],
	description: FlatTable,
	body: Uint8Array,
): Batch {
	if (description.has(3)) throw new RangeError("it is compressed, which is not read");
	const reader = new BatchReader(description, body);
	const rows = description.count(0);
	if (rows > Math.max(MOST_EMPTY_ROWS, 8 * body.length))
		throw new RangeError(`it has ${rows} rows in ${body.length} bytes`);
	const columns: (readonly [string, Read])[] = [];
	for (const field of fields) {
		const column = reader.column(field);
		if (column.length !== rows) throw new RangeError(`the column ${field.name} has ${column.length} of ${rows} rows`);
		if (wanted.includes(field.name)) columns.push([field.name, column.read]);
	}
	return {
		rows,
		row: (index) => {
			reader.left = MOST_VALUES;
			return Object.fromEntries(columns.map(([name, read]) => [name, read(index)]));
		},
	};
}

class BatchReader {
	readonly #nodes: readonly (readonly [length: number, nulls: number])[];
	readonly #buffers: readonly (readonly [offset: number, length: number])[];
	#node = 0;
	#buffer = 0;
	/** Number of values that the current row may still have. */
	left = 0;

	constructor(
		description: FlatTable,
		private readonly body: Uint8Array,
	) {
		this.#nodes = description.pairs(1);
		this.#buffers = description.pairs(2);
	}

	#take(): Uint8Array {
		const [offset, length] = this.#buffers[this.#buffer++] ?? [0, 0];
		if (this.#buffer > this.#buffers.length || offset + length > this.body.length) {
			throw new RangeError("a column goes beyond the end");
		}
		return this.body.subarray(offset, offset + length);
	}

	column(field: ArrowField): Column {
		const node = this.#nodes[this.#node++];
		if (node === undefined) throw new RangeError(`the column ${field.name} is missing`);
		const [length] = node;
		if (field.type === Type.null) return { length, read: () => null };
		const valid = this.#take();
		const read = this.#values(field, length);
		return {
			length,
			read: (row) => {
				if (--this.left < 0) throw new RangeError(`a row has more than ${MOST_VALUES} values`);
				if (!(row >= 0 && row < length))
					throw new RangeError(`a list goes beyond the ${length} values of ${field.name}`);
				if (valid.length > 0 && !bit(valid, row)) return null;
				return read(row);
			},
		};
	}

	#values(field: ArrowField, length: number): Read {
		switch (field.type) {
			case Type.struct: {
				const children = field.children.map((child) => [child.name, this.column(child).read] as const);
				return (row) => Object.fromEntries(children.map(([name, read]) => [name, read(row)]));
			}
			case Type.fixedList: {
				const item = this.column(only(field));
				return (row) => this.#list(item.read, row * field.width, (row + 1) * field.width);
			}
			case Type.list:
			case Type.map:
			case Type.largeList: {
				const range = ranges(this.#take(), length, field.type === Type.largeList);
				const item = this.column(only(field));
				return (row) => this.#list(item.read, ...range(row));
			}
			case Type.text:
			case Type.largeText:
			case Type.binary:
			case Type.largeBinary: {
				const range = ranges(this.#take(), length, field.type === Type.largeText || field.type === Type.largeBinary);
				const bytes = this.#take();
				const isText = field.type === Type.text || field.type === Type.largeText;
				return (row) => {
					const [begin, end] = range(row);
					if (end > bytes.length)
						throw new RangeError(`a value goes beyond the ${bytes.length} bytes of ${field.name}`);
					return isText ? text(bytes.subarray(begin, end)) : bytes.subarray(begin, end);
				};
			}
			default:
				return fixed(field, this.#take());
		}
	}

	#list(read: Read, begin: number, end: number): unknown[] {
		if (end - begin > this.left) throw new RangeError(`a row has more than ${MOST_VALUES} values`);
		return Array.from({ length: end - begin }, (_, i) => read(begin + i));
	}
}

function only({ name, children }: ArrowField): ArrowField {
	const [child] = children;
	if (child === undefined || children.length !== 1)
		throw new RangeError(`the list ${name} has ${children.length} kinds of entries`);
	return child;
}

function bit(bytes: Uint8Array, index: number): boolean {
	const byte = bytes[index >> 3];
	if (byte === undefined) throw new RangeError("a column ends early");
	return ((byte >> (index & 7)) & 1) === 1;
}

const decoder = new TextDecoder();
const text = (bytes: Uint8Array) => decoder.decode(bytes);

/** Begin and end of the values of a column of variable lengths. */
function ranges(offsets: Uint8Array, length: number, large: boolean): (row: number) => [number, number] {
	const width = large ? 8 : 4;
	if (length > 0 && offsets.length < (length + 1) * width) throw new RangeError("a column has too few offsets");
	const view = viewOf(offsets);
	const at = (row: number) => (large ? Number(view.getBigInt64(8 * row, true)) : view.getInt32(4 * row, true));
	return (row) => {
		const [begin, end] = [at(row), at(row + 1)];
		if (!(begin >= 0 && end >= begin && Number.isSafeInteger(end))) throw new RangeError("an offset is damaged");
		return [begin, end];
	};
}

/** Reads values of a fixed width: numbers and booleans; null for other types. */
function fixed({ type, width, signed }: ArrowField, bytes: Uint8Array): Read {
	const view = viewOf(bytes);
	if (type === Type.bool) return (row) => bit(bytes, row);
	if (type === Type.fixedBinary) {
		return (row) => {
			if ((row + 1) * width > bytes.length) throw new RangeError("a column ends early");
			return bytes.subarray(row * width, (row + 1) * width);
		};
	}
	if (type === Type.float && width === 32) return (row) => view.getFloat32(4 * row, true);
	if (type === Type.float && width === 64) return (row) => view.getFloat64(8 * row, true);
	if (type !== Type.int) return () => null;
	switch (width) {
		case 8:
			return (row) => (signed ? view.getInt8(row) : view.getUint8(row));
		case 16:
			return (row) => (signed ? view.getInt16(2 * row, true) : view.getUint16(2 * row, true));
		case 32:
			return (row) => (signed ? view.getInt32(4 * row, true) : view.getUint32(4 * row, true));
		case 64:
			return (row) => {
				const value = signed ? view.getBigInt64(8 * row, true) : view.getBigUint64(8 * row, true);
				return Number.isSafeInteger(Number(value)) ? Number(value) : value;
			};
		default:
			return () => null;
	}
}

function viewOf(bytes: Uint8Array): DataView {
	return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
