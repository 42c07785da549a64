/**
 * Checks the pages of Parquet columns, and the structs of Thrift's compact protocol that describe them, before hyparquet
 * reads them, which trusts lengths and runs, so that a damaged page could exhaust the memory. A page has to lie in its
 * column, decompress to its stated size, and have no runs beyond its values.
 */

import { brotliDecompressSync, gunzipSync, zstdDecompressSync } from "node:zlib";
import { type ColumnMetaData, type Compressors, type SchemaElement, snappyUncompress } from "hyparquet";
import type { InputFile } from "../../../system/input-file.ts";

const Type = { stop: 0, true: 1, false: 2, byte: 3, i16: 4, i32: 5, i64: 6, double: 7, binary: 8, list: 9, struct: 12 };
const DEEPEST = 64;

/** Integers and structs in a struct, by the number of their field. */
interface ThriftStruct {
	readonly numbers: ReadonlyMap<number, number>;
	readonly structs: ReadonlyMap<number, ThriftStruct>;
	/** Numbers of the fields that are false. */
	readonly falses: ReadonlySet<number>;
	/** Byte after the struct. */
	readonly end: number;
}

/**
 * Walks a struct. Throws a RangeError for negative lengths, for lists with more entries than bytes, and for values beyond
 * the end.
 */
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

/** Most decompressed bytes of a row group. While a page is decompressed, memory holds it twice. */
export const LARGEST_GROUP = 2 ** 30;
/** Most values, with those of lists, of a column of a row group with fewer bytes. */
const MOST_VALUES = 2 ** 20;

/** Decompressed bytes after which unused pages are freed: the engine itself waits for more, since it does not count them. */
const COLLECTED = 2 ** 27;
let uncollected = 0;

type Unpacking = (bytes: Uint8Array, length: number) => Uint8Array;

function collect(bytes: number): void {
	uncollected += bytes;
	if (uncollected <= COLLECTED) return;
	uncollected = 0;
	Bun.gc(true);
}

function collecting(unpacking: Unpacking): Unpacking {
	return (bytes, length) => {
		collect(length);
		const unpacked = unpacking(bytes, length);
		collect(length);
		return unpacked;
	};
}

export const compressors: Compressors = {
	SNAPPY: collecting((bytes, length) => {
		const unpacked = new Uint8Array(length);
		snappyUncompress(bytes, unpacked);
		return unpacked;
	}),
	GZIP: collecting((bytes, length) => gunzipSync(bytes, { maxOutputLength: Math.max(1, length) })),
	BROTLI: collecting((bytes, length) => brotliDecompressSync(bytes, { maxOutputLength: Math.max(1, length) })),
	ZSTD: collecting((bytes, length) => zstdDecompressSync(bytes, { maxOutputLength: Math.max(1, length) })),
	LZ4_RAW: collecting(unpackLz4),
};

/** Decompresses a block of LZ4 to `length` bytes: sequences of literals and of a copy of earlier bytes, with literals alone at the end. */
function unpackLz4(bytes: Uint8Array, length: number): Uint8Array {
	const unpacked = new Uint8Array(length);
	let at = 0;
	let to = 0;
	while (at < bytes.length) {
		const token = bytes[at++]!;
		// Bytes up to the first below 255 extend a count of 15. Behind the end, undefined makes it NaN, which fails the checks.
		let literals = token >> 4;
		for (let more = literals === 15 ? 255 : 0; more === 255; literals += more) more = bytes[at++]!;
		if (!(at + literals <= bytes.length && to + literals <= length)) throw new RangeError("an LZ4 block is damaged");
		for (const end = at + literals; at < end; ) unpacked[to++] = bytes[at++]!;
		if (at === bytes.length) break;
		const distance = bytes[at++]! + 256 * bytes[at++]!;
		let count = 4 + (token & 15);
		for (let more = count === 19 ? 255 : 0; more === 255; count += more) more = bytes[at++]!;
		if (!(distance > 0 && distance <= to && to + count <= length)) throw new RangeError("an LZ4 block is damaged");
		for (const end = to + count; to < end; to++) unpacked[to] = unpacked[to - distance]!;
	}
	if (to !== length) throw new RangeError("an LZ4 block is damaged");
	return unpacked;
}

/** Numbers of parquet.thrift: fields of page headers, and encodings with runs. */
const Header = { unpacked: 2, packed: 3, dataV1: 5, dictionary: 7, dataV2: 8 } as const;
const runEncodings: readonly (number | undefined)[] = [2, 3, 8];
const RLE = 3;

/** Largest repetition and definition levels of a column. */
interface Levels {
	readonly repetition: number;
	readonly definition: number;
}

/** Throws a RangeError if a page of a column chunk is damaged or decompresses to too many bytes or values. */
export function checkPages(file: InputFile, chunk: ColumnMetaData, schema: readonly SchemaElement[]): void {
	const begin = Number(chunk.dictionary_page_offset || chunk.data_page_offset);
	const end = begin + Number(chunk.total_compressed_size);
	if (!(begin >= 0 && end >= begin && end <= file.size)) throw new RangeError("a column lies outside of the file");
	const levels = levelsOf(schema, chunk.path_in_schema);
	let unpacked = 0;
	let values = 0;
	for (let at = begin; at < end - 1; ) {
		const header = pageHeader(file, at, end);
		const { numbers, structs } = header;
		const [length, size] = [numbers.get(Header.unpacked) ?? -1, numbers.get(Header.packed) ?? -1];
		const [v1, v2] = [structs.get(Header.dataV1), structs.get(Header.dataV2)];
		const page = v1 ?? v2 ?? structs.get(Header.dictionary);
		const entries = page?.numbers.get(1) ?? 0;
		const content = at + header.end;
		if (!(size >= 0 && length >= 0 && entries >= 0 && content + size <= end)) throw new RangeError("a page is damaged");
		unpacked += length;
		values += entries;
		// Runs of equal values have few bytes.
		if (unpacked > LARGEST_GROUP || values > Math.max(MOST_VALUES, 8 * unpacked)) {
			throw new RangeError("its pages hold too much");
		}
		if (v1 !== undefined) checkV1(unpack(file.read(content, size), length, chunk), v1, levels, chunk);
		else if (v2 !== undefined) checkV2(file.read(content, size), length, v2, levels, chunk);
		at = content + size;
	}
}

function checkV1(bytes: Uint8Array, { numbers }: ThriftStruct, levels: Levels, { type }: ColumnMetaData): void {
	const view = viewOf(bytes);
	const count = numbers.get(1) ?? 0;
	let at = 0;
	for (const most of [levels.repetition, levels.definition]) {
		if (most === 0) continue;
		checkRuns(view, at + 4, bitsOf(most), count);
		at += 4 + view.getUint32(at, true);
	}
	checkValues(view, at, numbers.get(2), type === "BOOLEAN", count);
}

function checkV2(bytes: Uint8Array, length: number, page: ThriftStruct, levels: Levels, chunk: ColumnMetaData): void {
	const { numbers } = page;
	const [count, nulls] = [numbers.get(1) ?? 0, numbers.get(2) ?? 0];
	const [definition, repetition] = [numbers.get(5) ?? 0, numbers.get(6) ?? 0];
	const values = definition + repetition;
	if (!(definition >= 0 && repetition >= 0 && values <= bytes.length && nulls >= 0 && nulls <= count)) {
		throw new RangeError("a page is damaged");
	}
	const view = viewOf(bytes);
	if (levels.repetition > 0) checkRuns(view, 0, bitsOf(levels.repetition), count);
	if (levels.definition > 0) checkRuns(view, repetition, bitsOf(levels.definition), count);
	const packed = bytes.subarray(values);
	const plain = page.falses.has(7) ? packed : unpack(packed, length - values, chunk);
	checkValues(viewOf(plain), 0, numbers.get(4), chunk.type === "BOOLEAN", count - nulls);
}

/** Checks values that are encoded as runs: dictionary indices or booleans. `most`: number of values of the page. */
function checkValues(view: DataView, at: number, encoding: number | undefined, isBool: boolean, most: number): void {
	if (!runEncodings.includes(encoding) || at >= view.byteLength) return;
	if (isBool || encoding === RLE) checkRuns(view, at + 4, 1, most);
	else if (view.getUint8(at) > 32) throw new RangeError("a page is damaged");
	else if (view.getUint8(at) > 0) checkRuns(view, at + 1, view.getUint8(at), most);
}

/** Checks runs of values of `width` bits from byte `at` on, up to `count` values or the end of the page. */
function checkRuns(view: DataView, at: number, width: number, count: number): void {
	for (let seen = 0; seen < count && at < view.byteLength; ) {
		let header = 0;
		for (let shift = 0; ; shift += 7) {
			const byte = view.getUint8(at++);
			if (shift > 28) throw new RangeError("a run of a page is damaged");
			header += (byte & 127) * 2 ** shift;
			if (byte < 128) break;
		}
		const isPacked = header % 2 === 1;
		const run = Math.floor(header / 2) * (isPacked ? 8 : 1);
		// A bit-packed run is padded to whole bytes.
		if (run > count - seen + (isPacked ? 7 : 0)) throw new RangeError("a run of a page has too many values");
		seen += run;
		at += isPacked ? Math.ceil((run * width) / 8) : Math.ceil(width / 8);
	}
}

function unpack(bytes: Uint8Array, length: number, { codec }: ColumnMetaData): Uint8Array {
	if (codec === "UNCOMPRESSED") return bytes;
	const unpacking = Object.hasOwn(compressors, codec) ? compressors[codec] : undefined;
	if (unpacking === undefined) throw new RangeError(`the codec ${codec} is not read`);
	return unpacking(bytes, length);
}

function bitsOf(most: number): number {
	return 32 - Math.clz32(most);
}

/** Largest levels of the column at a path from the root. The schema lists the nodes of a tree in preorder. */
function levelsOf(schema: readonly SchemaElement[], path: readonly string[]): Levels {
	let [repetition, definition] = [0, 0];
	let at = 0;
	for (const name of path) {
		const children = schema[at]?.num_children ?? 0;
		let child = at + 1;
		for (let i = 0; i < children && schema[child]?.name !== name; i++) child = behind(schema, child);
		const kind = schema[child]?.repetition_type;
		if (kind === "REPEATED") repetition++;
		if (kind !== "REQUIRED") definition++;
		at = child;
	}
	return { repetition, definition };
}

/** Index of the first node after the subtree of `node`. */
function behind(schema: readonly SchemaElement[], node: number): number {
	let next = node + 1;
	for (let left = schema[node]?.num_children ?? 0; left > 0 && next < schema.length; left--) {
		left += schema[next]?.num_children ?? 0;
		next++;
	}
	return next;
}

/** The header of a page, which is short unless it has statistics. */
function pageHeader(file: InputFile, at: number, end: number): ThriftStruct {
	for (let length = 512; ; length *= 8) {
		const bytes = file.read(at, Math.min(length, end - at));
		try {
			return walkStruct(viewOf(bytes), 0);
		} catch (error) {
			if (!(error instanceof RangeError) || bytes.length === end - at) throw error;
		}
	}
}

export function viewOf(bytes: Uint8Array): DataView {
	return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
