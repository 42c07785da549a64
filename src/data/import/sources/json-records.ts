/** Cuts JSON into records: the lines of a JSONL file, or the entries of one list. Nothing is parsed here. */
import { UserError } from "../../../system/errors.ts";
import { InputFile } from "../../../system/input-file.ts";

export interface JsonRecord {
	/** Null: the record is too long. */
	readonly bytes: Uint8Array | null;
	/** Line in which the record begins, from 1. */
	readonly line: number;
	/** Byte and line after the record. */
	readonly end: number;
	readonly endLine: number;
}

const NEWLINE = 0x0a;
const isBlank = (byte: number) => byte === 0x20 || (byte >= 0x09 && byte <= 0x0d);

/** "list" for a file that begins with "[", "lines" for "{". Throws a UserError for other files. */
export function jsonForm(path: string): "list" | "lines" {
	using reader = new ByteReader(path);
	for (let at = 0; at < reader.size; ) {
		const chunk = reader.chunk(at);
		for (let i = 0; i < chunk.length; i++) {
			const byte = chunk[i]!;
			if (isBlank(byte) || (at + i < 3 && [0xef, 0xbb, 0xbf][at + i] === byte)) continue;
			if (byte === 0x5b) return "list";
			if (byte === 0x7b) return "lines";
			throw new UserError(`${path} begins with neither "[" nor "{": it is not UTF-8 JSON with records.`);
		}
		at += chunk.length;
	}
	throw new UserError(`${path} is empty.`);
}

/** Lines that are not blank, from byte `from` on, at which a line begins. */
export function* jsonLines(path: string, from: number, firstLine: number): Generator<JsonRecord, void, void> {
	using reader = new ByteReader(path, from);
	const record = new RecordBytes();
	let line = firstLine;
	for (let at = from; at < reader.size; ) {
		const chunk = reader.chunk(at);
		const newline = chunk.indexOf(NEWLINE);
		const piece = newline < 0 ? chunk : chunk.subarray(0, newline);
		record.add(piece);
		at += newline < 0 ? chunk.length : newline + 1;
		if (newline < 0 && at < reader.size) continue;
		const { tooLong } = record;
		const bytes = record.take();
		if (tooLong || !bytes.every(isBlank)) yield { bytes: tooLong ? null : bytes, line, end: at, endLine: line + 1 };
		line++;
	}
}

/** Position of the parser: before the list, between entries, in an entry, or after the list. */
type Place = "before" | "between" | "entry" | "behind";

/**
 * Entries of a file's list. `from`: 0, or the byte after an entry. Throws a UserError for a file without a list, or if the file
 * ends within an entry.
 */
export function* jsonEntries(path: string, from: number, firstLine: number): Generator<JsonRecord, void, void> {
	using reader = new ByteReader(path, from);
	const record = new RecordBytes();
	const damaged = (at: number, what: string) => new UserError(`${path}, line ${line} (byte ${at}): ${what}.`);
	let line = firstLine;
	let entryLine = line;
	let place = (from === 0 ? "before" : "between") as Place;
	/** Whether a comma has to precede the next entry. */
	let needsComma = from !== 0;
	let afterComma = false;
	let depth = 0;
	let inString = false;
	let escaped = false;
	for (let at = from; at < reader.size; ) {
		const chunk = reader.chunk(at);
		let begin = 0;
		for (let i = 0; i < chunk.length; i++) {
			const byte = chunk[i]!;
			if (byte === NEWLINE) line++;
			if (place === "entry") {
				if (inString) {
					if (escaped) escaped = false;
					else if (byte === 0x5c) escaped = true;
					else if (byte === 0x22) inString = false;
					continue;
				}
				if (byte === 0x22) inString = true;
				else if (byte === 0x7b || byte === 0x5b) depth++;
				else if (byte === 0x7d || byte === 0x5d) depth--;
				// A scalar ends before the next delimiter, an object or list with its last bracket.
				const scalarEnds = depth < 0 || (depth === 0 && byte === 0x2c);
				const ends = scalarEnds || (depth === 0 && (byte === 0x7d || byte === 0x5d));
				if (!ends) continue;
				const behind = scalarEnds ? i : i + 1;
				record.add(chunk.subarray(begin, behind));
				const { tooLong } = record;
				const bytes = record.take();
				const endLine = byte === NEWLINE && scalarEnds ? line - 1 : line;
				place = "between";
				needsComma = true;
				afterComma = false;
				yield { bytes: tooLong ? null : bytes, line: entryLine, end: at + behind, endLine };
				if (!scalarEnds) continue;
			}
			if (isBlank(byte)) continue;
			if (place === "before") {
				if (at + i < 3 && [0xef, 0xbb, 0xbf][at + i] === byte) continue;
				if (byte !== 0x5b) throw damaged(at + i, "a list has to begin here");
				place = "between";
			} else if (place === "behind") throw damaged(at + i, "the file continues after the list");
			else if (byte === 0x5d && !afterComma) place = "behind";
			else if (byte === 0x2c && needsComma) {
				needsComma = false;
				afterComma = true;
			} else if (needsComma) throw damaged(at + i, "a comma is missing after an entry");
			else {
				place = "entry";
				begin = i;
				entryLine = line;
				depth = byte === 0x7b || byte === 0x5b ? 1 : 0;
				inString = byte === 0x22;
				escaped = false;
				afterComma = false;
				if (byte === 0x2c || byte === 0x7d || byte === 0x5d) throw damaged(at + i, "an entry is missing");
			}
		}
		if (place === "entry") record.add(chunk.subarray(begin));
		at += chunk.length;
	}
	if (place !== "behind") throw damaged(reader.size, "the list does not end");
}

// Reads a file from front to back, a chunk at a time.

const CHUNK = 2 ** 20;

class ByteReader implements Disposable {
	readonly #file: InputFile;
	#chunk: Uint8Array = new Uint8Array(0);
	#start: number;

	constructor(
		readonly path: string,
		from = 0,
	) {
		this.#file = InputFile.open(path);
		this.#start = from;
	}

	get size(): number {
		return this.#file.size;
	}

	/** The chunk from byte `at` on, which may not be before the previous chunk; empty at the end of the file. */
	chunk(at: number): Uint8Array {
		if (at < this.#start || at >= this.#start + this.#chunk.length) {
			this.#start = at;
			this.#chunk = this.#file.read(at, Math.max(0, Math.min(CHUNK, this.size - at)));
		}
		return this.#chunk.subarray(at - this.#start);
	}

	[Symbol.dispose](): void {
		this.#file[Symbol.dispose]();
	}
}

/** Bytes of the longest record; longer records are skipped. */
export const LARGEST_RECORD = 2 ** 26;

/** Collects the bytes of a record from several chunks. */
class RecordBytes {
	#pieces: Uint8Array[] = [];
	#length = 0;

	/** Whether the record is too long. */
	get tooLong(): boolean {
		return this.#length > LARGEST_RECORD;
	}

	add(piece: Uint8Array): void {
		this.#length += piece.length;
		if (this.tooLong) this.#pieces = [];
		else this.#pieces.push(piece);
	}

	/** Returns the collected bytes and begins the next record. */
	take(): Uint8Array {
		const bytes = this.#pieces.length === 1 ? this.#pieces[0]! : Buffer.concat(this.#pieces);
		this.#pieces = [];
		this.#length = 0;
		return bytes;
	}
}
