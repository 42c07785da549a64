/**
 * Reads tar archives (POSIX ustar, GNU and PAX long names and sizes) from bytes in memory. Contents are views, not
 * copies. Throws a TarError with the position for a damaged archive.
 */
import { shownAddress } from "../../../system/addresses.ts";
import { watched } from "../../../system/read-watch.ts";
import { BrokenSampleError, DamagedIndexError, FatalSampleError } from "../errors.ts";
import type { RawSample } from "../sample.ts";
import { broughtIn } from "../storage/open.ts";
import { isUrl, type RandomAccessFile, type Storage } from "../storage/storage.ts";
import type { SampleReader } from "../wrappers/sample-loader.ts";
import { OffsetIndex } from "./jsonl.ts";
import { splitMemberName, tarIndexName } from "./names.ts";
import type { SplitPart } from "./webdataset.ts";

export class TarError extends Error {
	override readonly name = "TarError";
	constructor(
		sentence: string,
		/** Bytes that are needed where the given bytes end too early. */
		readonly needed: number | null = null,
	) {
		super(sentence);
	}
}

export interface TarMember {
	readonly name: string;
	/** Whether the member is a regular file, rather than a folder, link or device. */
	readonly isFile: boolean;
	/** Offset of the member's first header block, which may be an extension header. */
	readonly headerOffset: number;
	readonly contentOffset: number;
	readonly size: number;
	/** Offset of the next member's first block. */
	readonly end: number;
}

const BLOCK = 512;
/** Bytes of the largest extension header (long name or PAX records). */
const MOST_EXTENSION_BYTES = 1 << 20;

const decoder = new TextDecoder();

/** The member whose header is at `offset`, or null at the end-of-archive block. Offsets are within `bytes`. */
export function readMember(bytes: Uint8Array, offset: number): TarMember | null {
	let at = offset;
	let longName: string | null = null;
	let pax: ReadonlyMap<string, string> = new Map();
	for (;;) {
		if (at + BLOCK > bytes.length) throw new TarError(`the header at byte ${at} is cut off`, at + BLOCK);
		const header = bytes.subarray(at, at + BLOCK);
		if (isZero(header)) {
			if (at === offset) return null;
			throw new TarError(`the extension header at byte ${offset} is followed by no member`);
		}
		checkSum(header, at);
		const type = header[156]!;
		let size = readNumber(header.subarray(124, 136), at);
		const content = at + BLOCK;
		const isExtension = type === 0x4c || type === 0x4b || type === 0x78 || type === 0x67;
		if (isExtension) {
			if (size > MOST_EXTENSION_BYTES) throw new TarError(`the extension header at byte ${at} has ${size} bytes`);
			if (content + size > bytes.length)
				throw new TarError(`the extension header at byte ${at} is cut off`, content + size);
			const payload = bytes.subarray(content, content + size);
			if (type === 0x4c) longName = readText(payload);
			else if (type === 0x78) pax = readPax(payload, at);
			at = content + roundUp(size);
			continue;
		}
		const paxSize = pax.get("size");
		if (paxSize !== undefined) {
			size = Number(paxSize);
			if (!Number.isSafeInteger(size) || size < 0) throw new TarError(`the size at byte ${at} is "${paxSize}"`);
		}
		const name = pax.get("path") ?? longName ?? headerName(header);
		const isFile = (type === 0x30 || type === 0 || type === 0x37) && !(type === 0 && name.endsWith("/"));
		// Links and folders have no content, whatever their size field is.
		const stored = isFile || type > 0x37 ? size : 0;
		return { name, isFile, headerOffset: offset, contentOffset: content, size, end: content + roundUp(stored) };
	}
}

/** Contents of a member. Throws a TarError if the archive ends before. */
function memberContent(bytes: Uint8Array, member: TarMember): Uint8Array {
	const end = member.contentOffset + member.size;
	if (end > bytes.length) {
		throw new TarError(`${member.name} has ${member.size} bytes, more than are left`, end);
	}
	return bytes.subarray(member.contentOffset, end);
}

function roundUp(size: number): number {
	return Math.ceil(size / BLOCK) * BLOCK;
}

function isZero(header: Uint8Array): boolean {
	if (header[0] !== 0 || header[BLOCK - 1] !== 0) return false;
	for (const byte of header) if (byte !== 0) return false;
	return true;
}

/** Verifies a header's checksum: the sum of all bytes, with the checksum field as spaces; old writers sum signed bytes. */
function checkSum(header: Uint8Array, at: number): void {
	let unsigned = 0;
	let negative = 0;
	for (let i = 0; i < BLOCK; i++) {
		const byte = header[i]!;
		unsigned += byte;
		if (byte >= 0x80) negative += 256;
	}
	for (let i = 148; i < 156; i++) {
		unsigned += 0x20 - header[i]!;
		if (header[i]! >= 0x80) negative -= 256;
	}
	const expected = readNumber(header.subarray(148, 156), at);
	if (expected !== unsigned && expected !== unsigned - negative) {
		throw new TarError(`there is no member at byte ${at}: the header's checksum is wrong`);
	}
}

/** An octal number, or a base-256 number where the first bit is set. */
function readNumber(field: Uint8Array, at: number): number {
	let value = 0;
	if (field[0] === 0x80) {
		for (let i = 1; i < field.length; i++) value = value * 256 + field[i]!;
	} else if (field[0] === 0xff) {
		throw new TarError(`a number at byte ${at} is negative`);
	} else {
		const octal = readOctal(field);
		if (octal !== null) return octal;
		const text = readText(field).trim();
		if (!/^[0-7]*$/.test(text)) throw new TarError(`a number at byte ${at} is "${text}"`);
		value = text === "" ? 0 : Number.parseInt(text, 8);
	}
	if (!Number.isSafeInteger(value)) throw new TarError(`a number at byte ${at} is too large`);
	return value;
}

/** The octal digits of a field, perhaps after spaces and ended by a space or zero byte; null for any other form. */
function readOctal(field: Uint8Array): number | null {
	let at = 0;
	while (field[at] === 0x20) at++;
	let value = 0;
	const first = at;
	for (; at < field.length; at++) {
		const digit = field[at]! - 0x30;
		if (digit < 0 || digit > 7) break;
		value = value * 8 + digit;
	}
	if (at === first || at >= field.length) return null;
	const zero = field[at] === 0 || (field[at] === 0x20 && (at + 1 === field.length || field[at + 1] === 0));
	return zero && Number.isSafeInteger(value) ? value : null;
}

/** Text up to the first zero byte. */
function readText(field: Uint8Array): string {
	const end = field.indexOf(0);
	const length = end < 0 ? field.length : end;
	let text = "";
	for (let i = 0; i < length; i++) {
		const byte = field[i]!;
		if (byte >= 0x80) return decoder.decode(field.subarray(0, length));
		text += String.fromCharCode(byte);
	}
	return text;
}

function headerName(header: Uint8Array): string {
	const name = readText(header.subarray(0, 100));
	const prefix = header[345] === 0 ? "" : readText(header.subarray(345, 500));
	return prefix === "" ? name : `${prefix}/${name}`;
}

/** Records "length key=value\n". */
function readPax(payload: Uint8Array, at: number): Map<string, string> {
	const records = new Map<string, string>();
	for (let start = 0; start < payload.length && payload[start] !== 0; ) {
		const space = payload.indexOf(0x20, start);
		const digits = space < 0 ? "" : decoder.decode(payload.subarray(start, space));
		const length = /^\d{1,9}$/.test(digits) ? Number(digits) : 0;
		const end = start + length;
		if (length < digits.length + 3 || end > payload.length || payload[end - 1] !== 0x0a) {
			throw new TarError(`the PAX header at byte ${at} is damaged`);
		}
		const record = decoder.decode(payload.subarray(space + 1, end - 1));
		const equals = record.indexOf("=");
		if (equals < 0) throw new TarError(`the PAX header at byte ${at} has a record without "="`);
		records.set(record.slice(0, equals), record.slice(equals + 1));
		start = end;
	}
	return records;
}

// Reads single samples of the shards of a split part by index (docs/spec/energon.md §1.2).

/** Bytes of the largest sample, with all its parts and their headers. */
export const LARGEST_SAMPLE = 2 ** 30;
/** The limit, for messages. */
const sampleLimit = `a sample has at most ${LARGEST_SAMPLE}`;

/** Whether to read the part with an extension. */
export type PartFilter = (extension: string) => boolean;

/** Bytes of a sample in a shard, its index for messages, the parts to read, and whether to read a sample "shard/key". */
type SampleRange = readonly [
	offset: number,
	length: number,
	index: number | string,
	wanted: PartFilter | null,
	accept: (name: string) => boolean,
];

/** Keeps the `size` most recently opened files open. */
class OpenFiles<File extends { close(): void }> {
	readonly #open = new Map<string, File>();

	constructor(
		private readonly size: number,
		private readonly openFile: (path: string) => File,
	) {}

	get(path: string): File {
		let file = this.#open.get(path);
		if (file === undefined) {
			file = this.openFile(path);
			this.#open.set(path, file);
			for (const [oldest, stale] of this.#open) {
				if (this.#open.size <= this.size) break;
				stale.close();
				this.#open.delete(oldest);
			}
		}
		return file;
	}
}

/** Opens shards and reads samples from byte ranges. */
export class TarFiles {
	readonly #files: OpenFiles<RandomAccessFile>;
	/** For the sources of samples. */
	readonly datasetPath: string;

	constructor(
		storage: Storage,
		/** Of the data set. */
		folder: string,
		/** Number of shards that are open at once. */
		openShards: number,
	) {
		this.datasetPath = shownAddress(folder);
		this.#files = new OpenFiles(Math.max(1, openShards), (path) => storage.open(path));
	}

	/**
	 * The sample in bytes [offset, offset + length) of a shard; null if `accept` refuses its "shard/key". Throws a
	 * BrokenSampleError if the range does not hold exactly one sample.
	 */
	sample(shard: { readonly name: string; readonly path: string }, ...range: SampleRange): RawSample | null {
		// A shard on a server is fetched by another thread, which looks at the time itself.
		if (isUrl(shard.path)) return this.#sample(shard, ...range);
		return watched(shard.path, () => this.#sample(shard, ...range));
	}

	#sample(
		shard: { readonly name: string; readonly path: string },
		...[offset, length, index, wanted, accept]: SampleRange
	): RawSample | null {
		const broken = (sentence: string, key: string | null = null) =>
			new BrokenSampleError(
				sentence,
				{ datasetPath: this.datasetPath, index, shardName: shard.name, fileNames: [] },
				key,
			);
		// A shard that cannot be opened ends the run, because its samples may be intact.
		const file = this.#files.get(shard.path);
		if (length > LARGEST_SAMPLE) throw broken(`${shard.path}: sample ${index} has ${length} bytes; ${sampleLimit}.`);
		let bytes = file.read(offset, length, { lazily: true });
		let key: string | null = null;
		const parts = new Map<string, Uint8Array>();
		const fileNames: string[] = [];
		// Where the range ends within the last member, the size in the member's header decides.
		const reading = <Result>(read: () => Result): Result => {
			try {
				return read();
			} catch (error) {
				const needed = error instanceof TarError ? error.needed : null;
				const more = needed !== null && needed > bytes.length && needed <= LARGEST_SAMPLE;
				if (!more || offset + needed > file.size) throw error;
				bytes = file.read(offset, needed, { lazily: true });
				return reading(read);
			}
		};
		try {
			for (let at = 0; at < length; ) {
				const member = reading(() => readMember(bytes, at));
				if (member === null) throw new TarError("the archive ends inside the sample");
				at = member.end;
				const name = member.isFile ? splitMemberName(member.name) : null;
				if (name === null) continue;
				if (key === null) {
					key = name.base;
					if (!accept(`${shard.name}/${key}`)) return null;
				} else if (key !== name.base) {
					throw new TarError(`it holds two samples, ${key} and ${name.base}`);
				}
				if (wanted !== null && !wanted(name.extension)) continue;
				parts.set(name.extension, broughtIn(reading(() => memberContent(bytes, member))));
				fileNames.push(member.name);
			}
		} catch (error) {
			if (!(error instanceof TarError)) throw error;
			throw broken(
				`${shard.path} is broken at sample ${index}${key === null ? "" : ` (${key})`}, bytes ${offset} to ${offset + length}: ${error.message}. Run \`mimo data lint\`, or exclude the shard or sample in split.yaml.`,
				key,
			);
		}
		if (key === null) {
			throw broken(
				`${shard.path} has no sample ${index}: bytes ${offset} to ${offset + length} hold no file. Prepare the data set again.`,
			);
		}
		const sources = [{ datasetPath: this.datasetPath, index, shardName: shard.name, fileNames }];
		return { key, shard: shard.name, sources, parts };
	}
}

/** Byte range of sample `local` of a shard. */
function rangeOf(offsets: OffsetIndex, local: number): [number, number] {
	// The first sample's range begins with the file; members of no sample before it are skipped.
	const offset = local === 0 ? 0 : offsets.at(local);
	const end = local + 1 < offsets.length ? offsets.at(local + 1) : offset;
	if (end < offset) throw new DamagedIndexError(`${offsets.path}: entry ${local + 1} is below entry ${local}.`);
	return [offset, end];
}

/** Samples of a split part by index. */
export class SplitPartReader implements SampleReader {
	readonly #files: TarFiles;
	readonly #indexes: OpenFiles<OffsetIndex>;
	readonly #part: SplitPart;
	readonly #wanted: PartFilter | null;
	/** First sample index of every shard, and the total. */
	readonly #starts: number[] = [0];
	/** Shard of the last read, which is tried first because reads are mostly sequential. */
	#current = 0;

	constructor(
		storage: Storage,
		folder: string,
		part: SplitPart,
		options: { readonly wanted: PartFilter | null; readonly openShards: number },
	) {
		this.#part = part;
		this.#wanted = options.wanted;
		this.#files = new TarFiles(storage, folder, options.openShards);
		this.#indexes = new OpenFiles(Math.max(1, options.openShards), (path) => OffsetIndex.open(storage, path));
		for (const { count } of part.shards) this.#starts.push(this.#starts[this.#starts.length - 1]! + count);
	}

	read(index: number): RawSample | null {
		const shardIndex = this.#shardOf(index);
		const shard = this.#part.shards[shardIndex]!;
		const local = index - this.#starts[shardIndex]!;
		const broken = (sentence: string) =>
			new BrokenSampleError(sentence, {
				datasetPath: this.#files.datasetPath,
				index,
				shardName: shard.name,
				fileNames: [],
			});
		const offsets = this.#indexes.get(tarIndexName(shard.path));
		let range: [number, number];
		try {
			range = rangeOf(offsets, local);
		} catch (error) {
			throw error instanceof DamagedIndexError ? broken(error.message) : error;
		}
		const [offset, end] = range;
		return this.#files.sample(
			shard,
			offset,
			end - offset,
			index,
			this.#wanted,
			(name) => !this.#part.excludes.has(name),
		);
	}

	#shardOf(index: number): number {
		const starts = this.#starts;
		const holds = (shard: number) => index >= starts[shard]! && index < starts[shard + 1]!;
		if (holds(this.#current)) return this.#current;
		let low = 0;
		let high = starts.length - 1;
		while (low < high) {
			const middle = (low + high) >> 1;
			if (starts[middle + 1]! <= index) low = middle + 1;
			else high = middle;
		}
		if (low >= starts.length - 1 || !holds(low)) {
			throw new FatalSampleError(`There is no sample ${index}; the split part has ${starts[starts.length - 1]}.`);
		}
		this.#current = low;
		return low;
	}
}
