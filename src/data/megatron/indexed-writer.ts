/** Writes Megatron's indexed data (IndexedDatasetBuilder of megatron/core/datasets/indexed_dataset.py), byte for byte. */
import { closeSync, openSync, writeSync } from "node:fs";
import { fileError } from "../../system/system-errors.ts";

/** Code and array of the values that are written: 16 bits where they hold the vocabulary with room to spare. */
const types = { uint16: { code: 8, array: Uint16Array }, int32: { code: 4, array: Int32Array } } as const;

/** Vocabularies below this size are written in 16 bits. */
const SMALL_VOCABULARY = 65_500;

/** Bytes that are collected before they are written. */
const BUFFER = 2 ** 22;

export class IndexedWriter implements Disposable {
	readonly #type: (typeof types)[keyof typeof types];
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
		this.#type = vocabularySize < SMALL_VOCABULARY ? types.uint16 : types.int32;
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
