/**
 * Writes torch.save archives as PyTorch does, and their pickles: of protocol 2 without memo, which the loaders of PyTorch
 * and Megatron accept (docs/spec/checkpoint.md §1.3–§1.5): plain data, torch dtypes and sizes, and instances of named
 * classes. Records are not compressed, data is aligned to 64 bytes from the start of the archive, sizes and checksums come
 * after the data. Tensor data is streamed.
 */
import { crc32 } from "node:zlib";
import { type DtypeTag, dtypes } from "../dtype.ts";
import type { OutputFile } from "../files.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "./values.ts";

/** A Python float, also where the value is a whole number. */
export class PythonFloat {
	constructor(readonly value: number) {}
}

/** The call `type(*args)`, which makes sizes, layouts and enumeration members. */
export class Call {
	constructor(
		readonly type: Global,
		readonly args: readonly unknown[],
	) {}
}

/** Opcodes that push one object, copied into the pickle. */
export class RawPickle {
	constructor(readonly bytes: Uint8Array) {}
}

export function torchSize(sizes: readonly number[]): Call {
	return new Call(new Global("torch", "Size"), [new Tuple(sizes)]);
}

/** An instance of a class with a dict or a tuple as state. */
export function instance(
	module: string,
	name: string,
	state?: Readonly<Record<string, unknown>> | Tuple,
): PythonObject {
	const object = new PythonObject(new Global(module, name), []);
	if (state !== undefined) object.state = state instanceof Tuple ? state : new Map(Object.entries(state));
	return object;
}

/** The pickle of a value. Whole numbers become ints; a PythonFloat becomes a float. */
export function pickle(value: unknown): Uint8Array {
	const writer = new Writer();
	writer.bytes([0x80, 2]);
	writer.value(value);
	writer.bytes([0x2e]);
	return writer.result();
}

class Writer {
	#buffer = new Uint8Array(4096);
	#length = 0;

	result(): Uint8Array {
		return this.#buffer.slice(0, this.#length);
	}

	bytes(data: ArrayLike<number>): void {
		const needed = this.#length + data.length;
		if (needed > this.#buffer.length) {
			const larger = new Uint8Array(Math.max(needed, 2 * this.#buffer.length));
			larger.set(this.#buffer.subarray(0, this.#length));
			this.#buffer = larger;
		}
		this.#buffer.set(data, this.#length);
		this.#length = needed;
	}

	value(value: unknown): void {
		if (value === null || value === undefined) this.bytes([0x4e]);
		else if (typeof value === "boolean") this.bytes([value ? 0x88 : 0x89]);
		else if (typeof value === "number") this.#number(value);
		else if (typeof value === "bigint") this.#integer(value);
		else if (typeof value === "string") this.#text(value);
		else if (value instanceof PythonFloat) this.#float(value.value);
		else if (value instanceof RawPickle) this.bytes(value.bytes);
		else if (Array.isArray(value)) this.#list(value);
		else if (value instanceof Tuple) this.#tuple(value.items);
		else if (value instanceof Map) this.#dict(value);
		else this.#named(value);
	}

	#number(value: number): void {
		if (Number.isSafeInteger(value) && !Object.is(value, -0)) this.#integer(BigInt(value));
		else this.#float(value);
	}

	#float(value: number): void {
		const bytes = new Uint8Array(9);
		bytes[0] = 0x47;
		new DataView(bytes.buffer).setFloat64(1, value, false);
		this.bytes(bytes);
	}

	#integer(value: bigint): void {
		if (value >= 0n && value < 256n) this.bytes([0x4b, Number(value)]);
		else if (value >= -(2n ** 31n) && value < 2n ** 31n) this.bytes([0x4a, ...u32(Number(value))]);
		else {
			const bytes: number[] = [];
			let rest = value;
			while (rest !== 0n && rest !== -1n) {
				bytes.push(Number(rest & 255n));
				rest >>= 8n;
			}
			// The highest bit is the sign.
			if (bytes.at(-1)! >= 128 !== value < 0n) bytes.push(value < 0n ? 255 : 0);
			if (bytes.length > 255) throw new RangeError("An integer is too long for a pickle.");
			this.bytes([0x8a, bytes.length, ...bytes]);
		}
	}

	#text(value: string): void {
		const bytes = new TextEncoder().encode(value);
		this.bytes([0x58, ...u32(bytes.length)]);
		this.bytes(bytes);
	}

	#list(items: readonly unknown[]): void {
		this.bytes([0x5d]);
		if (items.length === 0) return;
		this.bytes([0x28]);
		for (const item of items) this.value(item);
		this.bytes([0x65]);
	}

	#tuple(items: readonly unknown[]): void {
		if (items.length === 0) {
			this.bytes([0x29]);
			return;
		}
		this.bytes([0x28]);
		for (const item of items) this.value(item);
		this.bytes([0x74]);
	}

	#dict(entries: ReadonlyMap<unknown, unknown>): void {
		this.bytes([0x7d]);
		if (entries.size === 0) return;
		this.bytes([0x28]);
		for (const [key, value] of entries) {
			this.value(key);
			this.value(value);
		}
		this.bytes([0x75]);
	}

	#named(value: unknown): void {
		if (value instanceof TorchDtype) this.#global(new Global("torch", dtypes[value.tag].torch));
		else if (value instanceof Global) this.#global(value);
		else if (value instanceof Call) {
			this.#global(value.type);
			this.#tuple(value.args);
			this.bytes([0x52]);
		} else if (value instanceof PythonObject) {
			this.#global(value.type);
			this.#tuple(value.args);
			this.bytes([0x81]);
			if (value.state !== undefined) {
				this.value(value.state);
				this.bytes([0x62]);
			}
		} else throw new RangeError("A value cannot be pickled.");
	}

	#global({ module, name }: Global): void {
		this.bytes(new TextEncoder().encode(`c${module}\n${name}\n`));
	}
}

function u32(value: number): number[] {
	return [value & 255, (value >>> 8) & 255, (value >>> 16) & 255, (value >>> 24) & 255];
}

const ALIGNMENT = 64;
/** Bytes of the largest record: larger records need zip64 sizes. Tensors are cut into smaller chunks. */
const LARGEST_RECORD = 2 ** 31;

interface WrittenRecord {
	readonly name: Uint8Array;
	readonly header: number;
	readonly size: number;
	readonly crc: number;
}

/** Writes one archive to a file, behind other archives. */
class ArchiveWriter {
	readonly #start: number;
	readonly #records: WrittenRecord[] = [];

	constructor(
		readonly file: OutputFile,
		readonly prefix: string,
	) {
		this.#start = file.position;
	}

	record(name: string, pieces: Iterable<Uint8Array>): void {
		const encoded = new TextEncoder().encode(`${this.prefix}/${name}`);
		const header = this.file.position - this.#start;
		const padding = -(header + 30 + encoded.length + 4) & (ALIGNMENT - 1);
		const local = new DataView(new ArrayBuffer(30));
		local.setUint32(0, 0x04034b50, true);
		local.setUint16(6, 0x0808, true);
		local.setUint16(26, encoded.length, true);
		local.setUint16(28, 4 + padding, true);
		const extra = new Uint8Array(4 + padding).fill(0x5a);
		extra.set([0x46, 0x42, padding & 255, padding >> 8]);
		for (const part of [new Uint8Array(local.buffer), encoded, extra]) this.file.write(part);
		let size = 0;
		let crc = 0;
		for (const piece of pieces) {
			this.file.write(piece);
			crc = crc32(piece, crc);
			size += piece.byteLength;
		}
		if (size > LARGEST_RECORD) throw new RangeError(`A record of ${size} bytes is too large for one chunk.`);
		const descriptor = new DataView(new ArrayBuffer(16));
		descriptor.setUint32(0, 0x08074b50, true);
		descriptor.setUint32(4, crc, true);
		descriptor.setUint32(8, size, true);
		descriptor.setUint32(12, size, true);
		this.file.write(new Uint8Array(descriptor.buffer));
		this.#records.push({ name: encoded, header, size, crc });
	}

	/** Writes the central directory. Returns the archive's length. */
	close(): number {
		const directory = this.file.position - this.#start;
		for (const { name, header, size, crc } of this.#records) {
			const entry = new DataView(new ArrayBuffer(46));
			entry.setUint32(0, 0x02014b50, true);
			entry.setUint16(8, 0x0808, true);
			entry.setUint32(16, crc, true);
			entry.setUint32(20, size, true);
			entry.setUint32(24, size, true);
			entry.setUint16(28, name.length, true);
			entry.setUint32(42, header, true);
			this.file.write(new Uint8Array(entry.buffer));
			this.file.write(name);
		}
		const end = new DataView(new ArrayBuffer(22));
		end.setUint32(0, 0x06054b50, true);
		end.setUint16(8, this.#records.length, true);
		end.setUint16(10, this.#records.length, true);
		end.setUint32(12, this.file.position - this.#start - directory, true);
		end.setUint32(16, directory, true);
		this.file.write(new Uint8Array(end.buffer));
		return this.file.position - this.#start;
	}
}

function writeArchive(file: OutputFile, prefix: string, data: Uint8Array, storages: Iterable<Uint8Array>[]): number {
	const writer = new ArchiveWriter(file, prefix);
	const text = (value: string) => [new TextEncoder().encode(value)];
	writer.record("data.pkl", [data]);
	writer.record(".format_version", text("1"));
	writer.record(".storage_alignment", text(String(ALIGNMENT)));
	writer.record("byteorder", text("little"));
	storages.forEach((pieces, index) => {
		writer.record(`data/${index}`, pieces);
	});
	writer.record("version", text("3\n"));
	return writer.close();
}

/** Appends torch.save of a value without tensors; returns the length. */
export function writeObject(file: OutputFile, value: unknown, prefix = "archive"): number {
	return writeArchive(file, prefix, pickle(value), []);
}

/** Appends torch.save of a contiguous tensor, given as pieces of its bytes; returns the length. */
export function writeTensor(
	file: OutputFile,
	dtype: DtypeTag,
	shape: readonly number[],
	pieces: Iterable<Uint8Array>,
): number {
	return writeArchive(file, "archive", pickle(rebuiltTensor(dtype, shape, "0")), [pieces]);
}

/** Appends torch.save of `[tensor]` with a byte tensor without elements: an empty extra state. */
export function writeEmptyTensorList(file: OutputFile): number {
	return writeArchive(file, "archive", pickle([rebuiltTensor("U8", [0], "0")]), [[]]);
}

function rebuiltTensor(dtype: DtypeTag, shape: readonly number[], key: string): Call {
	const elements = shape.reduce((product, size) => product * size, 1);
	const strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((product, size) => product * size, 1));
	const { storage, torch, bits } = dtypes[dtype];
	const type = storage === null ? new Global("torch.storage", "UntypedStorage") : new Global("torch", storage);
	const length = storage === null ? (elements * bits) / 8 : elements;
	const id = pickle(new Tuple(["storage", type, key, "cpu", length]));
	// The pickle without its PROTO and STOP opcodes, followed by BINPERSID.
	const persistent = new RawPickle(Uint8Array.of(...id.subarray(2, -1), 0x51));
	const hooks = new Call(new Global("collections", "OrderedDict"), []);
	const args = [persistent, 0, new Tuple(shape), new Tuple(strides), false, hooks];
	return storage === null
		? new Call(new Global("torch._utils", "_rebuild_tensor_v3"), [...args, new Global("torch", torch)])
		: new Call(new Global("torch._utils", "_rebuild_tensor_v2"), args);
}
