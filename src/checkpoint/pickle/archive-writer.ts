/**
 * Writes torch.save archives as PyTorch does: uncompressed records, data aligned to 64 bytes from the start of the archive,
 * sizes and checksums after the data (docs/spec/checkpoint.md §1.4, §1.5). Tensor data is streamed.
 */
import { crc32 } from "node:zlib";
import { type DtypeTag, dtypes } from "../dtype.ts";
import type { OutputFile } from "../files.ts";
import { Global, Tuple } from "./values.ts";
import { Call, pickle, RawPickle } from "./writer.ts";

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
