/**
 * Megatron's indexed data: token ids one after the other in PREFIX.bin, and in PREFIX.idx where each sequence of them begins. Both
 * layouts of the index are read: MMIDIDX, and the older TNTIDX of fairseq. All numbers are little-endian.
 */

import { closeSync, openSync, writeSync } from "node:fs";
import { UserError } from "../../system/errors.ts";
import { InputFile } from "../../system/input-file.ts";
import { fileError } from "../../system/system-errors.ts";

/** Types of the values in a .bin file by their code in the index (DType in megatron/core/datasets/indexed_dataset.py). */
const types = {
	1: ["uint8", Uint8Array],
	2: ["int8", Int8Array],
	3: ["int16", Int16Array],
	4: ["int32", Int32Array],
	5: ["int64", BigInt64Array],
	6: ["float64", Float64Array],
	7: ["float32", Float32Array],
	8: ["uint16", Uint16Array],
} as const;
type Values = InstanceType<(typeof types)[keyof typeof types][1]>;

interface Index {
	readonly type: (typeof types)[keyof typeof types];
	/** Tokens of every sequence. */
	readonly lengths: Int32Array;
	/** Byte of the .bin file at which every sequence begins. */
	readonly pointers: Float64Array;
	/** Index of the sequence before which every document begins, and behind the last one the number of sequences. */
	readonly documents: Float64Array;
	/** A number for every sequence, which multimodal sets have; null: the index has none. */
	readonly modes: Int8Array | null;
}

export class IndexedFile implements Disposable {
	/** Where a sequence's bytes are read to. */
	#bytes = new Uint8Array(1 << 16);

	private constructor(
		readonly prefix: string,
		private readonly index: Index,
		private readonly bin: InputFile,
	) {}

	/** Reads PREFIX.idx and opens PREFIX.bin. Throws a UserError that names file and offset of the first damage. */
	static open(prefix: string): IndexedFile {
		using file = InputFile.open(`${prefix}.idx`);
		const index = new IndexReader(file).read();
		const bin = InputFile.open(`${prefix}.bin`);
		try {
			requireInside(index, file.path, bin);
		} catch (error) {
			bin[Symbol.dispose]();
			throw error;
		}
		return new IndexedFile(prefix, index, bin);
	}

	get lengths(): Int32Array {
		return this.index.lengths;
	}

	get documents(): Float64Array {
		return this.index.documents;
	}

	get modes(): Int8Array | null {
		return this.index.modes;
	}

	/** Name of the values' type, as numpy has it. */
	get type(): string {
		return this.index.type[0];
	}

	/**
	 * Reads `count` ids of a sequence, from its token `offset` on, to into[at, at + count). Throws a UserError that names file, offset
	 * and id where one is not below `vocabularySize`.
	 */
	read(
		sequence: number,
		{ offset, count, vocabularySize }: { offset: number; count: number; vocabularySize: number },
		into: Int32Array,
		at: number,
	): void {
		const [name, Type] = this.index.type;
		if (name === "float32" || name === "float64") {
			throw new UserError(`${this.bin.path} holds ${name} values, not token ids.`);
		}
		const size = Type.BYTES_PER_ELEMENT;
		if (this.#bytes.length < size * count) this.#bytes = new Uint8Array(2 * size * count);
		const position = this.index.pointers[sequence]! + size * offset;
		this.bin.readInto(position, this.#bytes.subarray(0, size * count));
		const values: Values = new Type(this.#bytes.buffer, 0, count);
		const wrong = copyIds(values, into, at, vocabularySize);
		if (wrong < 0) return;
		throw new UserError(
			`${this.bin.path}, byte ${position + size * wrong}: the token id ${values[wrong]} is outside the vocabulary of vocab-size ${vocabularySize}.`,
		);
	}

	[Symbol.dispose](): void {
		this.bin[Symbol.dispose]();
	}
}

/** Copies ids; returns the index of the first one outside [0, most), or -1. */
function copyIds(values: Values, into: Int32Array, at: number, most: number): number {
	for (let i = 0; i < values.length; i++) {
		const id = Number(values[i]!);
		if (!(id >= 0 && id < most)) return i;
		into[at + i] = id;
	}
	return -1;
}

/** Reads an index from front to back. */
class IndexReader {
	#at = 0;

	constructor(private readonly file: InputFile) {}

	read(): Index {
		const magic = Buffer.from(this.#bytes(Math.min(9, this.file.size))).toString("latin1");
		if (magic === "MMIDIDX\0\0") return this.#current();
		if (!magic.startsWith("TNTIDX\0\0")) {
			throw new UserError(`${this.file.path} is no index of Megatron's: it begins with neither MMIDIDX nor TNTIDX.`);
		}
		this.#at = 8;
		return this.#legacy();
	}

	#current(): Index {
		this.#version();
		const type = this.#type(this.#bytes(1)[0]!, this.#at - 1);
		const sequences = this.#count("sequences");
		const documentCount = this.#count("documents");
		const without = this.#at + 12 * sequences + 8 * documentCount;
		if (this.file.size !== without && this.file.size !== without + sequences) {
			throw this.#wrong(
				this.#at,
				`${sequences} sequences and ${documentCount} document bounds make ${without} bytes, or ${without + sequences} with modes; the file has ${this.file.size}`,
			);
		}
		const lengths = new Int32Array(this.#bytes(4 * sequences).buffer);
		const pointers = this.#longs(sequences);
		const documents = this.#documents(documentCount, sequences);
		const modes = this.file.size === without ? null : new Int8Array(this.#bytes(sequences).buffer);
		return { type, lengths, pointers, documents, modes };
	}

	/** The index of Megatron-LM's older lazy and cached data sets (megatron/data/indexed_dataset.py until 2023). */
	#legacy(): Index {
		this.#version();
		const type = this.#type(this.#count("type"), this.#at - 8);
		const elementAt = this.#at;
		const size = this.#count("bytes of a value");
		if (size !== type[1].BYTES_PER_ELEMENT) {
			throw this.#wrong(elementAt, `a value of ${type[0]} has ${type[1].BYTES_PER_ELEMENT} bytes, not ${size}`);
		}
		const sequences = this.#count("sequences");
		const sizesAt = this.#at;
		const sizes = this.#count("sizes");
		if (sizes !== sequences) throw this.#wrong(sizesAt, `${sequences} sequences have ${sizes} sizes, not one each`);
		const documentCount = this.#count("documents");
		const expected = this.#at + 8 * (3 * sequences + 2 + documentCount);
		if (this.file.size !== expected) {
			throw this.#wrong(this.#at, `the counts make ${expected} bytes; the file has ${this.file.size}`);
		}
		const dimensionsAt = this.#at;
		const dimensions = this.#longs(sequences + 1);
		const wrong = dimensions.findIndex((value, i) => value !== i);
		if (wrong >= 0) throw this.#wrong(dimensionsAt + 8 * wrong, "a sequence is not a row of values");
		const pointers = this.#longs(sequences + 1)
			.map((value) => value * size)
			.subarray(0, sequences);
		const lengths = Int32Array.from(this.#longs(sequences));
		return { type, lengths, pointers, documents: this.#documents(documentCount, sequences), modes: null };
	}

	#version(): void {
		const version = this.#count("version");
		if (version !== 1) throw this.#wrong(this.#at - 8, `its version is ${version}; version 1 is read`);
	}

	#type(code: number, at: number): Index["type"] {
		if (code in types) return types[code as keyof typeof types];
		throw this.#wrong(at, `there is no type of values ${code}; they are 1 to 8`);
	}

	#documents(count: number, sequences: number): Float64Array {
		const begin = this.#at;
		const documents = this.#longs(count);
		let before = 0;
		for (let i = 0; i < count; i++) {
			if (!(documents[i]! >= before)) throw this.#wrong(begin + 8 * i, "documents are not in order");
			before = documents[i]!;
		}
		if (count > 0 && before === sequences) return documents;
		throw this.#wrong(begin + 8 * Math.max(0, count - 1), `documents end at ${before} of ${sequences} sequences`);
	}

	#count(what: string): number {
		const value = this.#longs(1)[0]!;
		if (Number.isSafeInteger(value) && value >= 0) return value;
		throw this.#wrong(this.#at - 8, `${value} is no number of ${what}`);
	}

	/** 64-bit integers as doubles, which are exact for all that a file can have. */
	#longs(count: number): Float64Array {
		const words = new Uint32Array(this.#bytes(8 * count).buffer);
		return Float64Array.from({ length: count }, (_, i) => (words[2 * i + 1]! | 0) * 2 ** 32 + words[2 * i]!);
	}

	#bytes(length: number): Uint8Array {
		const bytes = this.file.read(this.#at, length);
		this.#at += length;
		return bytes;
	}

	#wrong(at: number, reason: string): UserError {
		return new UserError(`${this.file.path}, byte ${at}: ${reason}.`);
	}
}

/** Throws a UserError for the first sequence that does not lie in the .bin file. */
function requireInside({ type, lengths, pointers }: Index, path: string, bin: InputFile): void {
	const size = type[1].BYTES_PER_ELEMENT;
	for (let i = 0; i < lengths.length; i++) {
		const [length, pointer] = [lengths[i]!, pointers[i]!];
		if (length >= 0 && pointer >= 0 && pointer + size * length <= bin.size) continue;
		throw new UserError(
			`${path}: sequence ${i} has ${length} values of ${size} bytes from byte ${pointer} on; ${bin.path} has ${bin.size} bytes.`,
		);
	}
}

// Writes Megatron's indexed data (IndexedDatasetBuilder of megatron/core/datasets/indexed_dataset.py), byte for byte.

/** Code and array of the values that are written: 16 bits where they hold the vocabulary with room to spare. */
const writtenTypes = { uint16: { code: 8, array: Uint16Array }, int32: { code: 4, array: Int32Array } } as const;

/** Vocabularies below this size are written in 16 bits. */
const SMALL_VOCABULARY = 65_500;

/** Bytes that are collected before they are written. */
const BUFFER = 2 ** 22;

export class IndexedWriter implements Disposable {
	readonly #type: (typeof writtenTypes)[keyof typeof writtenTypes];
	readonly #lengths = new Growing(Int32Array);
	readonly #documents = new Growing(Float64Array);
	readonly #buffer = new Uint8Array(BUFFER);
	#filled = 0;
	#bin: number | null;

	/** Begins PREFIX.bin. Throws a UserError where it cannot be written. */
	constructor(
		private readonly prefix: string,
		vocabularySize: number,
	) {
		this.#type = vocabularySize < SMALL_VOCABULARY ? writtenTypes.uint16 : writtenTypes.int32;
		this.#bin = opened(`${prefix}.bin`);
		this.#documents.push(0);
	}

	/** Adds a document; `lengths`: tokens of its sequences, which sum to those of `ids`. */
	add(ids: Int32Array, lengths: readonly number[]): void {
		const values = new this.#type.array(ids);
		this.#write(new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
		for (const length of lengths) this.#lengths.push(length);
		this.#documents.push(this.#lengths.count);
	}

	/** Ends PREFIX.bin and writes PREFIX.idx. */
	finish(): void {
		this.#flush();
		this[Symbol.dispose]();
		const lengths = this.#lengths.values() as Int32Array;
		const documents = this.#documents.values() as Float64Array;
		const head = Buffer.alloc(34);
		head.write("MMIDIDX\0\0", "latin1");
		head.writeBigUInt64LE(1n, 9);
		head.writeUInt8(this.#type.code, 17);
		head.writeBigUInt64LE(BigInt(lengths.length), 18);
		head.writeBigUInt64LE(BigInt(documents.length), 26);
		let pointer = 0;
		const pointers = new BigInt64Array(lengths.length);
		for (let i = 0; i < lengths.length; i++) {
			pointers[i] = BigInt(pointer);
			pointer += lengths[i]! * this.#type.array.BYTES_PER_ELEMENT;
		}
		const file = opened(`${this.prefix}.idx`);
		try {
			for (const part of [head, lengths, pointers, BigInt64Array.from(documents, BigInt)]) {
				writeAll(`${this.prefix}.idx`, file, new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
			}
		} finally {
			closeSync(file);
		}
	}

	[Symbol.dispose](): void {
		if (this.#bin !== null) closeSync(this.#bin);
		this.#bin = null;
	}

	#write(bytes: Uint8Array): void {
		if (this.#filled + bytes.length > BUFFER) this.#flush();
		if (bytes.length > BUFFER) {
			writeAll(`${this.prefix}.bin`, this.#bin!, bytes);
		} else {
			this.#buffer.set(bytes, this.#filled);
			this.#filled += bytes.length;
		}
	}

	#flush(): void {
		writeAll(`${this.prefix}.bin`, this.#bin!, this.#buffer.subarray(0, this.#filled));
		this.#filled = 0;
	}
}

function opened(path: string): number {
	try {
		return openSync(path, "w");
	} catch (error) {
		throw fileError("write", path, error);
	}
}

function writeAll(path: string, file: number, bytes: Uint8Array): void {
	try {
		for (let done = 0; done < bytes.length; ) done += writeSync(file, bytes, done);
	} catch (error) {
		throw fileError("write", path, error);
	}
}

/** A typed array that grows. */
class Growing<Values extends Int32Array | Float64Array> {
	#values: Values;
	count = 0;

	constructor(private readonly type: new (length: number) => Values) {
		this.#values = new type(1024);
	}

	push(value: number): void {
		if (this.count === this.#values.length) {
			const wider = new this.type(2 * this.count);
			wider.set(this.#values);
			this.#values = wider;
		}
		this.#values[this.count++] = value;
	}

	values(): Values {
		return this.#values.slice(0, this.count) as Values;
	}
}
