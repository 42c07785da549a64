/**
 * Checks structs of Thrift's compact protocol, the format of Parquet's metadata, before hyparquet reads them. Throws a RangeError
 * for negative lengths, for lists with more entries than bytes, and for values beyond the end.
 */

const Type = { stop: 0, true: 1, false: 2, byte: 3, i16: 4, i32: 5, i64: 6, double: 7, binary: 8, list: 9, struct: 12 };
const DEEPEST = 64;

/** Integers and structs in a struct, by the number of their field. */
export interface ThriftStruct {
	readonly numbers: ReadonlyMap<number, number>;
	readonly structs: ReadonlyMap<number, ThriftStruct>;
	/** Numbers of the fields that are false. */
	readonly falses: ReadonlySet<number>;
	/** Byte after the struct. */
	readonly end: number;
}

/** The struct at byte `at`. */
export function walkStruct(view: DataView, at: number, depth = 0): ThriftStruct {
	if (depth > DEEPEST) throw new RangeError(`its structs are nested more than ${DEEPEST} deep`);
	const numbers = new Map<number, number>();
	const structs = new Map<number, ThriftStruct>();
	const falses = new Set<number>();
	const cursor = { view, at };
	for (let field = 0; ; ) {
		const byte = view.getUint8(cursor.at++);
		const type = byte & 15;
		if (type === Type.stop) return { numbers, structs, falses, end: cursor.at };
		field = byte >> 4 === 0 ? signed(cursor) : field + (byte >> 4);
		if (type === Type.false) falses.add(field);
		if (type === Type.struct) {
			const inner = walkStruct(view, cursor.at, depth + 1);
			structs.set(field, inner);
			cursor.at = inner.end;
		} else if (type === Type.i16 || type === Type.i32 || type === Type.i64) numbers.set(field, signed(cursor));
		else passOver(cursor, type, depth);
	}
}

interface Cursor {
	readonly view: DataView;
	at: number;
}

function passOver(cursor: Cursor, type: number, depth: number): void {
	const { view } = cursor;
	switch (type) {
		case Type.true:
		case Type.false:
			return;
		case Type.byte:
			cursor.at++;
			break;
		case Type.i16:
		case Type.i32:
		case Type.i64:
			varint(cursor);
			break;
		case Type.double:
			cursor.at += 8;
			break;
		case Type.binary: {
			const length = varint(cursor);
			cursor.at += length;
			break;
		}
		case Type.list: {
			const head = view.getUint8(cursor.at++);
			const length = head >> 4 === 15 ? varint(cursor) : head >> 4;
			if (length > view.byteLength - cursor.at) throw new RangeError(`a list has ${length} entries`);
			const item = head & 15;
			for (let i = 0; i < length; i++) {
				if (item === Type.struct) cursor.at = walkStruct(view, cursor.at, depth + 1).end;
				else passOver(cursor, item === Type.true || item === Type.false ? Type.byte : item, depth + 1);
			}
			break;
		}
		default:
			throw new RangeError(`a value is of type ${type}`);
	}
	if (cursor.at > view.byteLength) throw new RangeError("a value goes beyond the end");
}

function varint(cursor: Cursor): number {
	let value = 0;
	for (let scale = 1; ; scale *= 128) {
		const byte = cursor.view.getUint8(cursor.at++);
		value += (byte & 127) * scale;
		if (byte < 128) return value;
		if (scale > 2 ** 63) throw new RangeError("a number has too many bytes");
	}
}

/** A zigzag-encoded integer: even values are 0, 1, 2, …, odd values -1, -2, … */
function signed(cursor: Cursor): number {
	const value = varint(cursor);
	return value % 2 === 0 ? value / 2 : -(value + 1) / 2;
}
