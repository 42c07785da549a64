/**
 * Reads torch.save archives: the pickled object and the values of its tensors. openTorchFile opens a .pt file; a
 * TorchArchive is one item of a .distcp file.
 */
import { crc32 } from "node:zlib";
import { UserError } from "../../system/errors.ts";
import { type ByteSource, InputFile } from "../../system/input-file.ts";
import { dtypes, elementCount, type TensorArray, viewAs } from "../dtype.ts";
import { StorageType, stateGlobals } from "./allowed.ts";
import { type AllowedGlobals, unpickle } from "./machine.ts";
import { StorageReference, type TensorReference, Tuple } from "./values.ts";

const END_BYTES = 22;
const LOCATOR_BYTES = 20;
const ZIP64_END_BYTES = 56;
const ENTRY_BYTES = 46;
const HEADER_BYTES = 30;
/** Bytes of the largest directory; a file of a whole model has some ten thousand records. */
const LARGEST_DIRECTORY = 2 ** 28;
const UNKNOWN = 0xffffffff;

interface Entry {
	readonly size: number;
	readonly crc: number;
	/** Offset of the local header from the start of the archive. */
	readonly header: number;
	/** Offset of the next record, or of the directory. */
	limit: number;
}

/**
 * Reads the zip archives of torch.save, a whole file or an item of a larger file (docs/spec/checkpoint.md §1.4, §2). A
 * record is checked before it is read: it lies inside the archive, overlaps no other, is not compressed, and has the same
 * name in the directory and in its header.
 */
export class ZipArchive {
	readonly #entries: ReadonlyMap<string, Entry>;

	private constructor(
		readonly file: ByteSource,
		/** Position of the archive in the file. */
		readonly base: number,
		/** File or item; every error begins with it. */
		readonly where: string,
		entries: ReadonlyMap<string, Entry>,
	) {
		this.#entries = entries;
	}

	/** Reads the directory of the archive in the `length` bytes at `base`. The caller closes the file. */
	static open(file: ByteSource, base = 0, length = file.size - base, where = file.path): ZipArchive {
		const bad: Refuse = (reason) => {
			throw new UserError(`${where} is not a valid torch.save archive: ${reason}.`);
		};
		if (base < 0 || length < END_BYTES || base + length > file.size) bad("it is truncated");
		const entries = readDirectory(file, base, length, bad);
		limitEntries(entries, bad);
		return new ZipArchive(file, base, where, entries);
	}

	get names(): IterableIterator<string> {
		return this.#entries.keys();
	}

	has(name: string): boolean {
		return this.#entries.has(name);
	}

	/** Position of a record's bytes in the file, and their checksum (0: no checksum is stored). */
	locate(name: string): { readonly position: number; readonly size: number; readonly crc: number } {
		const entry = this.#entries.get(name) ?? this.#refuse(`it has no record ${name}`);
		const header = this.file.read(this.base + entry.header, HEADER_BYTES);
		const view = new DataView(header.buffer);
		if (view.getUint32(0, true) !== 0x04034b50) this.#refuse(`record ${name} has no header`);
		const [nameBytes, extraBytes] = [view.getUint16(26, true), view.getUint16(28, true)];
		const begin = entry.header + HEADER_BYTES + nameBytes + extraBytes;
		if (begin + entry.size > entry.limit) this.#refuse(`record ${name} overlaps what follows it`);
		const localName = this.file.read(this.base + entry.header + HEADER_BYTES, nameBytes);
		if (new TextDecoder().decode(localName) !== name) this.#refuse(`record ${name} has another name in its header`);
		return { position: this.base + begin, size: entry.size, crc: entry.crc };
	}

	/** The bytes of a record, after its checksum is verified. Throws a UserError for more than `limit` bytes. */
	read(name: string, limit: number): Uint8Array {
		const { position, size, crc } = this.locate(name);
		if (size > limit) this.#refuse(`record ${name} has ${size} bytes`);
		const bytes = this.file.read(position, size);
		if (crc !== 0 && crc32(bytes) !== crc) this.#refuse(`record ${name} is damaged (its checksum differs)`);
		return bytes;
	}

	#refuse(reason: string): never {
		throw new UserError(`${this.where} is not a valid torch.save archive: ${reason}.`);
	}
}

type Refuse = (reason: string) => never;

function readDirectory(file: ByteSource, base: number, length: number, bad: Refuse): Map<string, Entry> {
	const end = new DataView(file.read(base + length - END_BYTES, END_BYTES).buffer);
	if (end.getUint32(0, true) !== 0x06054b50) bad("its end record is missing (truncated?)");
	let count = end.getUint16(10, true);
	let size = end.getUint32(12, true);
	let offset = end.getUint32(16, true);
	let directoryEnd = length - END_BYTES;
	const locatorAt = length - END_BYTES - LOCATOR_BYTES;
	if (locatorAt >= ZIP64_END_BYTES) {
		const locator = new DataView(file.read(base + locatorAt, LOCATOR_BYTES).buffer);
		if (locator.getUint32(0, true) === 0x07064b50) {
			const at = locator.getBigUint64(8, true);
			if (at > BigInt(locatorAt - ZIP64_END_BYTES)) bad("its zip64 record lies outside");
			directoryEnd = Number(at);
			const record = new DataView(file.read(base + directoryEnd, ZIP64_END_BYTES).buffer);
			if (record.getUint32(0, true) !== 0x06064b50) bad("its zip64 record is missing");
			const safe = (position: number) => {
				const value = record.getBigUint64(position, true);
				return value > BigInt(length) ? bad("its zip64 record has an invalid value") : Number(value);
			};
			[count, size, offset] = [safe(32), safe(40), safe(48)];
		}
	}
	if (size > LARGEST_DIRECTORY || count * ENTRY_BYTES > size) bad("its directory has an invalid size");
	if (offset + size > directoryEnd) bad("its directory lies outside");
	return parseDirectory(file.read(base + offset, size), count, offset, bad);
}

function parseDirectory(bytes: Uint8Array, count: number, directoryStart: number, bad: Refuse): Map<string, Entry> {
	const view = new DataView(bytes.buffer as ArrayBuffer, bytes.byteOffset, bytes.byteLength);
	const decoder = new TextDecoder("utf-8", { fatal: true });
	const entries = new Map<string, Entry>();
	let at = 0;
	for (let i = 0; i < count; i++) {
		if (at + ENTRY_BYTES > bytes.length || view.getUint32(at, true) !== 0x02014b50) bad("its directory is damaged");
		const [nameBytes, extraBytes, commentBytes] = [28, 30, 32].map((field) => view.getUint16(at + field, true));
		const next = at + ENTRY_BYTES + nameBytes! + extraBytes! + commentBytes!;
		if (next > bytes.length) bad("its directory is damaged");
		let name = "";
		try {
			name = decoder.decode(bytes.subarray(at + ENTRY_BYTES, at + ENTRY_BYTES + nameBytes!));
		} catch {
			bad("a record's name is not UTF-8");
		}
		if (view.getUint16(at + 8, true) & 1) bad(`record ${name} is encrypted`);
		if (view.getUint16(at + 10, true) !== 0) bad(`record ${name} is compressed`);
		if (entries.has(name)) bad(`record ${name} occurs twice`);
		const extra = bytes.subarray(at + ENTRY_BYTES + nameBytes!, next - commentBytes!);
		const [size, packed, header] = wideValues(
			[view.getUint32(at + 24, true), view.getUint32(at + 20, true), view.getUint32(at + 42, true)],
			extra,
			name,
			bad,
		);
		if (size !== packed) bad(`record ${name} is compressed`);
		const smallest = header! + HEADER_BYTES + nameBytes! + size!;
		if (!Number.isSafeInteger(smallest) || smallest > directoryStart) bad(`record ${name} lies outside`);
		entries.set(name, { size: size!, crc: view.getUint32(at + 16, true), header: header!, limit: directoryStart });
		at = next;
	}
	return entries;
}

/** Replaces values of 0xffffffff by the 64-bit values of the zip64 extra field, which are in the same order. */
function wideValues(values: readonly number[], extra: Uint8Array, name: string, bad: Refuse): number[] {
	if (!values.includes(UNKNOWN)) return [...values];
	const view = new DataView(extra.buffer as ArrayBuffer, extra.byteOffset, extra.byteLength);
	for (let at = 0; at + 4 <= extra.length; ) {
		const [id, length] = [view.getUint16(at, true), view.getUint16(at + 2, true)];
		if (at + 4 + length > extra.length) break;
		if (id !== 1) {
			at += 4 + length;
			continue;
		}
		let field = at + 4;
		return values.map((value) => {
			if (value !== UNKNOWN) return value;
			if (field + 8 > at + 4 + length) return bad(`record ${name} lacks its zip64 size`);
			const wide = view.getBigUint64(field, true);
			field += 8;
			return wide > BigInt(Number.MAX_SAFE_INTEGER) ? bad(`record ${name} has an invalid size`) : Number(wide);
		});
	}
	return bad(`record ${name} lacks its zip64 size`);
}

/** Sets the limit of every record and refuses overlapping records. */
function limitEntries(entries: ReadonlyMap<string, Entry>, bad: Refuse): void {
	const sorted = [...entries].sort(([, a], [, b]) => a.header - b.header);
	for (let i = 0; i + 1 < sorted.length; i++) {
		const [name, entry] = sorted[i]!;
		const [nextName, next] = sorted[i + 1]!;
		entry.limit = next.header;
		if (entry.header + HEADER_BYTES + entry.size > entry.limit) bad(`records ${name} and ${nextName} overlap`);
	}
}

/** Bytes of the largest pickle; a tensor's pickle has some 200 bytes. */
const LARGEST_PICKLE = 2 ** 27;
const MOST_VALUES = 2 ** 22;

export class TorchArchive {
	readonly #prefix: string;

	constructor(readonly zip: ZipArchive) {
		const pickle = [...zip.names].filter((name) => name === "data.pkl" || name.endsWith("/data.pkl"));
		if (pickle.length !== 1) throw new UserError(`${zip.where} is not a torch.save archive: it has no data.pkl.`);
		this.#prefix = pickle[0]!.slice(0, -"data.pkl".length);
		const order = `${this.#prefix}byteorder`;
		if (zip.has(order) && new TextDecoder().decode(zip.read(order, 16)) !== "little") {
			throw new UserError(`${zip.where} was written on a big-endian machine, which is not supported.`);
		}
	}

	/** The object, with TensorReferences for its tensors; `limit`: bytes that its pickle may have. */
	load(allowed: AllowedGlobals, limit = LARGEST_PICKLE): unknown {
		const bytes = this.zip.read(`${this.#prefix}data.pkl`, limit);
		return unpickle(bytes, this.zip.where, { allowed, persistent: storageOf, limits: { values: MOST_VALUES } });
	}

	/** Position of a storage's bytes in the file. Throws a UserError where their number differs from the pickle's. */
	locate(storage: StorageReference): { readonly position: number; readonly size: number; readonly crc: number } {
		const record = this.zip.locate(`${this.#prefix}data/${storage.key}`);
		const expected = storage.length * (storage.dtype === null ? 1 : dtypes[storage.dtype].bits / 8);
		if (record.size !== expected) {
			throw new UserError(
				`${this.zip.where}: storage ${storage.key} has ${record.size} bytes, and its tensor needs ${expected}.`,
			);
		}
		return record;
	}

	/** The values of a tensor, made contiguous. */
	read({ storage, dtype, offset, shape, strides }: TensorReference): TensorArray {
		const bytes = dtypes[dtype].bits / 8;
		if (!Number.isInteger(bytes)) throw new UserError(`${this.zip.where}: tensors of ${dtype} are not supported.`);
		const { position } = this.locate(storage);
		const elements = elementCount(shape)!;
		if (elements === 0) return viewAs(dtype, new Uint8Array(0));
		if (isContiguous(shape, strides)) {
			return viewAs(dtype, this.zip.file.read(position + offset * bytes, elements * bytes));
		}
		// An expanded dimension (stride 0) repeats elements, so the result is bounded by the stored size.
		if (elements > 64 * storage.length + 1024) {
			throw new UserError(`${this.zip.where}: a tensor of shape [${shape}] repeats few stored elements.`);
		}
		const stored = this.zip.file.read(position, this.locate(storage).size);
		const values = new Uint8Array(elements * bytes);
		const index = shape.map(() => 0);
		for (let i = 0; i < elements; i++) {
			const from = (offset + index.reduce((sum, at, axis) => sum + at * strides[axis]!, 0)) * bytes;
			values.set(stored.subarray(from, from + bytes), i * bytes);
			for (let axis = shape.length - 1; axis >= 0 && ++index[axis]! === shape[axis]; axis--) index[axis] = 0;
		}
		return viewAs(dtype, values);
	}
}

export function isContiguous(shape: readonly number[], strides: readonly number[]): boolean {
	let expected = 1;
	for (let axis = shape.length - 1; axis >= 0; axis--) {
		if (shape[axis] !== 1 && strides[axis] !== expected) return false;
		expected *= shape[axis]!;
	}
	return true;
}

/** The storage of a persistent id ("storage", type, key, location, length); the location is ignored. */
export function storageOf(id: unknown): StorageReference {
	const [word, type, key, , length] = id instanceof Tuple ? id.items : [];
	if (word !== "storage" || !(type instanceof StorageType)) throw new RangeError("a persistent id is not a storage");
	if (typeof key !== "string" || !/^[0-9]{1,18}$/.test(key)) throw new RangeError("a storage has an invalid key");
	if (!Number.isSafeInteger(length) || (length as number) < 0) throw new RangeError("a storage has an invalid size");
	const bytes = type.dtype === null ? 1 : dtypes[type.dtype].bits / 8;
	if (!Number.isSafeInteger((length as number) * bytes)) throw new RangeError("a storage has an invalid size");
	return new StorageReference(type.dtype, key, length as number);
}

export interface TorchFile extends Disposable {
	readonly value: unknown;
	readTensor(reference: TensorReference): TensorArray;
}

/**
 * Opens a file of torch.save (the zip format). Globals outside the list of allowed names are refused; instances of the
 * classes in `inert` ("module Class") become PythonObjects. A link must not lead out of the folder `inside`.
 */
export function openTorchFile(
	path: string,
	options: { readonly inert?: readonly string[]; readonly inside?: string } = {},
): TorchFile {
	const file = InputFile.open(path, { inside: options.inside });
	try {
		if (file.size < 4 || new DataView(file.read(0, 4).buffer).getUint32(0, true) !== 0x04034b50) {
			throw new UserError(`${path} is not a zip archive; files of torch.save before PyTorch 1.6 are not supported.`);
		}
		const archive = new TorchArchive(ZipArchive.open(file));
		return {
			value: archive.load(stateGlobals(options.inert)),
			readTensor: (reference) => archive.read(reference),
			[Symbol.dispose]: () => file[Symbol.dispose](),
		};
	} catch (error) {
		file[Symbol.dispose]();
		throw error;
	}
}
