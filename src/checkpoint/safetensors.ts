/**
 * Safetensors files: a strict reader that fetches one tensor at a time (files of any length, memory of the one tensor)
 * and a streaming, atomic writer. Format: docs/spec/checkpoint.md §8.1; u64 header length n, n bytes of JSON, dense
 * little-endian data. Errors are UserErrors that name the file and the tensor.
 */

import { UserError } from "../system/errors.ts";
import { type ByteSource, InputFile, type OpenOptions } from "../system/input-file.ts";
import { measureJson } from "../system/json.ts";
import { bytesOf, type DtypeTag, dtypes, isDtypeTag, type TensorArray, tensorBytes, viewAs } from "./dtype.ts";
import { type OutputFile, writeFileAtomically } from "./files.ts";

/** The reference reader's limit. */
const LARGEST_HEADER = 100_000_000;
/** Tensors of one file: with their dtype, shape and offsets four keys each. */
const MOST_TENSORS = 2 ** 18;
const headerLimits = { values: 2 ** 23, depth: 3 };
/** More dimensions than any tensor library has: such a header is damaged. */
const LARGEST_RANK = 32;

export interface TensorInformation {
	readonly dtype: DtypeTag;
	readonly shape: readonly number[];
	/** Bytes of the dense values. */
	readonly bytes: number;
	/** Offset of the values in the file. */
	readonly position: number;
}

export class SafetensorsFile implements Disposable {
	readonly #file: ByteSource & Partial<Disposable>;

	/** Use openSafetensors. Owns `file`. */
	constructor(
		file: ByteSource & Partial<Disposable>,
		/** The `__metadata__` strings. */
		readonly metadata: ReadonlyMap<string, string>,
		/** In the order of the header. */
		readonly tensors: ReadonlyMap<string, TensorInformation>,
		/** Bytes before the data: the header and its length. */
		readonly headerBytes: number,
	) {
		this.#file = file;
	}

	get path(): string {
		return this.#file.path;
	}

	/** Dtype and shape of a tensor; an absent tensor is an error. */
	information(name: string): TensorInformation {
		const information = this.tensors.get(name);
		if (!information) throw new UserError(`${this.path} has no tensor ${name}.`);
		return information;
	}

	/** The header as it stands in the file, with its length in front. */
	readHeader(): Uint8Array {
		return this.#file.read(0, this.headerBytes);
	}

	/** All values of one tensor, row major, in memory of the caller's. bf16 and f16 come as their bits. */
	read(name: string): TensorArray {
		const { dtype, bytes, position } = this.information(name);
		return viewAs(dtype, this.#file.read(position, bytes));
	}

	/** Fills `into` with the tensor's bytes from byte `offset` on. */
	readInto(name: string, offset: number, into: Uint8Array): void {
		const { bytes, position } = this.information(name);
		if (offset < 0 || offset + into.byteLength > bytes) {
			throw new RangeError(`${name} in ${this.path} has ${bytes} bytes, not ${into.byteLength} at ${offset}.`);
		}
		this.#file.readInto(position + offset, into);
	}

	[Symbol.dispose](): void {
		this.#file[Symbol.dispose]?.();
	}
}

/** Opens a file and checks its whole header: nothing but the header is read or allocated. */
export function openSafetensors(path: string, options: OpenOptions = {}): SafetensorsFile {
	const file = InputFile.open(path, options);
	try {
		return parseSafetensors(file);
	} catch (error) {
		file[Symbol.dispose]();
		throw error;
	}
}

/** The tensors of a safetensors file whose bytes lie elsewhere; owns `file`. Throws a UserError for a file that is not valid. */
export function parseSafetensors(file: ByteSource & Partial<Disposable>): SafetensorsFile {
	const { path, size } = file;
	const bad = (sentence: string): never => {
		throw new UserError(`${path} is not a valid safetensors file: ${sentence}`);
	};
	if (size < 8) bad(`it has ${size} bytes, fewer than the 8 of a header length.`);
	const headerBytes = new DataView(file.read(0, 8).buffer).getBigUint64(0, true);
	if (headerBytes > BigInt(LARGEST_HEADER)) bad(`its header would have ${headerBytes} bytes.`);
	if (headerBytes > BigInt(size - 8)) bad(`its header of ${headerBytes} bytes is cut off at ${size - 8}.`);
	const dataStart = 8 + Number(headerBytes);
	const header = parseHeader(file.read(8, Number(headerBytes)), bad);

	const metadata = new Map<string, string>();
	const tensors = new Map<string, TensorInformation>();
	for (const [name, entry] of Object.entries(header)) {
		if (!isObject(entry)) bad(`its entry ${name} is not an object.`);
		if (name === "__metadata__") {
			for (const [key, value] of Object.entries(entry as object)) {
				if (typeof value !== "string") bad(`its __metadata__ value ${key} is not a string.`);
				metadata.set(key, value);
			}
		} else {
			tensors.set(name, parseTensor(name, entry as Record<string, unknown>, dataStart, size, bad));
		}
	}
	checkTiling(tensors, dataStart, size, bad);
	return new SafetensorsFile(file, metadata, tensors, dataStart);
}

type Refuse = (sentence: string) => never;

function isObject(value: unknown): value is Record<string, unknown> {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

function parseHeader(bytes: Uint8Array, bad: Refuse): Record<string, unknown> {
	if (bytes[0] !== 0x7b) bad("its header does not begin with {.");
	const { keys, values, depth } = measureJson(bytes, headerLimits);
	if (depth > headerLimits.depth) bad("its header is nested too deeply.");
	if (keys > 4 * MOST_TENSORS || values > headerLimits.values) {
		bad(`its header has more than ${MOST_TENSORS} tensors or ${headerLimits.values} values.`);
	}
	let header: unknown;
	try {
		header = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
	} catch {
		bad("its header is not UTF-8 JSON.");
	}
	if (!isObject(header)) bad("its header is not a JSON object.");
	// JSON.parse keeps the last of equal keys silently: then the text has more keys than the value.
	if (keys !== countEntries(header)) bad("a name occurs twice in its header.");
	return header as Record<string, unknown>;
}

/** Keys of all objects of a bounded depth. */
function countEntries(value: unknown): number {
	if (typeof value !== "object" || value === null) return 0;
	const children = Object.values(value);
	let entries = Array.isArray(value) ? 0 : children.length;
	for (const child of children) entries += countEntries(child);
	return entries;
}

function parseTensor(
	name: string,
	entry: Record<string, unknown>,
	dataStart: number,
	fileSize: number,
	bad: Refuse,
): TensorInformation {
	const { dtype, shape, data_offsets: offsets, ...rest } = entry;
	const surplus = Object.keys(rest)[0];
	if (surplus !== undefined) bad(`tensor ${name} has an unknown field ${surplus}.`);
	if (!isDtypeTag(dtype)) return bad(`tensor ${name} has an unknown dtype ${JSON.stringify(dtype)}.`);
	if (!Array.isArray(shape) || shape.length > LARGEST_RANK || !shape.every(isSize)) {
		return bad(`tensor ${name} has an invalid shape ${JSON.stringify(shape)}.`);
	}
	if (!isRange(offsets)) {
		return bad(`tensor ${name} has invalid data_offsets ${JSON.stringify(offsets)}.`);
	}
	const [begin, end] = offsets;
	const bytes = tensorBytes(dtype, shape);
	if (bytes === null) bad(`tensor ${name} of shape [${shape}] ${dtype} has an invalid size.`);
	if (end - begin !== bytes) {
		bad(`tensor ${name} of shape [${shape}] ${dtype} needs ${bytes} bytes, its data_offsets span ${end - begin}.`);
	}
	if (dataStart + end > fileSize) {
		bad(`tensor ${name} ends at byte ${dataStart + end} of a file of ${fileSize} (truncated?).`);
	}
	return { dtype, shape, bytes: end - begin, position: dataStart + begin };
}

function isRange(value: unknown): value is [number, number] {
	return Array.isArray(value) && value.length === 2 && value.every(isSize) && value[0]! <= value[1]!;
}

function isSize(value: unknown): value is number {
	return Number.isSafeInteger(value) && (value as number) >= 0;
}

/** The ranges must cover the data section exactly: no gap, no overlap, nothing after the last. */
function checkTiling(
	tensors: ReadonlyMap<string, TensorInformation>,
	dataStart: number,
	fileSize: number,
	bad: Refuse,
): void {
	const ranges = [...tensors].sort(([, a], [, b]) => a.position - b.position || a.bytes - b.bytes);
	let end = dataStart;
	let previous = "the header";
	for (const [name, { position, bytes }] of ranges) {
		if (position < end) bad(`tensor ${name} overlaps ${previous}.`);
		if (position > end) bad(`there is a gap of ${position - end} bytes between ${previous} and tensor ${name}.`);
		end = position + bytes;
		previous = `tensor ${name}`;
	}
	if (end !== fileSize) bad(`${fileSize - end} bytes follow ${previous}, the last of its data.`);
}

/** A tensor to write. `data` is called when its turn comes: its values, or the pieces they are made of. */
export interface TensorEntry {
	readonly name: string;
	readonly dtype: DtypeTag;
	readonly shape: readonly number[];
	readonly data: () => ArrayBufferView | Iterable<ArrayBufferView>;
}

/** Entries in the order of their data: larger elements first, then by name, so that every tensor is aligned. */
function safetensorsOrder<T extends Pick<TensorEntry, "name" | "dtype">>(entries: readonly T[]): T[] {
	return [...entries].sort(
		(a, b) => dtypes[b.dtype].bits - dtypes[a.dtype].bits || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0),
	);
}

/**
 * Writes a file of these tensors, atomically and durably; one tensor (or one piece of it) is in memory at a time.
 * Returns its size in bytes.
 */
export function writeSafetensors(
	path: string,
	entries: readonly TensorEntry[],
	metadata: Readonly<Record<string, string>> = { format: "pt" },
): number {
	return writeFileAtomically(path, (file) => {
		streamSafetensors(file, entries, metadata);
		return file.position;
	});
}

/** Called with the written bytes, in order. */
export interface SafetensorsObserver {
	readonly header?: (bytes: Uint8Array) => void;
	/** Before a tensor's first piece. */
	readonly begin?: (name: string, bytes: number) => void;
	readonly piece?: (name: string, bytes: Uint8Array) => void;
	/** After a tensor's last piece. */
	readonly end?: (name: string) => void;
}

/** Writes header and data of a safetensors file to a file just created. */
export function streamSafetensors(
	file: Pick<OutputFile, "path" | "write" | "expect">,
	entries: readonly TensorEntry[],
	metadata: Readonly<Record<string, string>>,
	observer: SafetensorsObserver = {},
): void {
	const { header, bytes: total, places } = safetensorsLayout(file.path, entries, metadata);
	observer.header?.(header);
	file.expect(total);
	file.write(header);
	for (const { name, dtype, shape, data } of places.keys()) {
		const bytes = tensorBytes(dtype, shape)!;
		observer.begin?.(name, bytes);
		let written = 0;
		const values = data();
		for (const piece of ArrayBuffer.isView(values) ? [values] : values) {
			const part = bytesOf(piece);
			file.write(part);
			observer.piece?.(name, part);
			written += part.byteLength;
		}
		if (written !== bytes) throw new RangeError(`${name} of shape [${shape}] got ${written} bytes, not ${bytes}.`);
		observer.end?.(name);
	}
}

/** The layout of a safetensors file of such tensors. */
export interface SafetensorsLayout<Entry> {
	readonly header: Uint8Array;
	/** Size of the file. */
	readonly bytes: number;
	/** Where the tensors begin in the file, in order. */
	readonly places: ReadonlyMap<Entry, number>;
}

export function safetensorsLayout<Entry extends Pick<TensorEntry, "name" | "dtype" | "shape">>(
	path: string,
	entries: readonly Entry[],
	metadata: Readonly<Record<string, string>>,
): SafetensorsLayout<Entry> {
	const header = new Map<string, unknown>();
	const offsets = new Map<Entry, number>();
	if (Object.keys(metadata).length > 0) header.set("__metadata__", metadata);
	let offset = 0;
	for (const entry of safetensorsOrder(entries)) {
		const { name, dtype, shape } = entry;
		const bytes = tensorBytes(dtype, shape);
		if (bytes === null) throw new RangeError(`${name} of shape [${shape}] ${dtype} has an invalid size.`);
		if (header.has(name)) throw new UserError(`Tensor ${name} would be written twice to ${path}.`);
		header.set(name, { dtype, shape, data_offsets: [offset, offset + bytes] });
		offsets.set(entry, offset);
		offset += bytes;
	}
	// Object.fromEntries would sort names that look like integers to the front.
	const json = [...header].map(([name, value]) => `${JSON.stringify(name)}:${JSON.stringify(value)}`).join(",");
	const text = new TextEncoder().encode(`{${json}}`);
	const length = Math.ceil((8 + text.length) / 8) * 8 - 8;
	const bytes = new Uint8Array(8 + length).fill(0x20);
	new DataView(bytes.buffer).setBigUint64(0, BigInt(length), true);
	bytes.set(text, 8);
	const places = new Map([...offsets].map(([entry, at]) => [entry, bytes.length + at]));
	return { header: bytes, bytes: bytes.length + offset, places };
}
