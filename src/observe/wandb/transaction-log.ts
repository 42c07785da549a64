/**
 * The file run-ID.wandb (core/pkg/leveldb/record.go of wandb): 7 bytes of head, then LevelDB's log format. Blocks of 32 KiB,
 * the first with the header, hold pieces of records: checksum (CRC-32 of kind and bytes), length, kind, bytes. A piece lies in a
 * single block; the end of a block that is shorter than a piece's header is zeros. Records that are added together are one write.
 */
import { closeSync, fsyncSync, ftruncateSync, openSync, readSync, writeSync } from "node:fs";
import { crc32 } from "node:zlib";

/** ":W&B", 0xBEE1, version 0. */
const head = Uint8Array.of(0x3a, 0x57, 0x26, 0x42, 0xe1, 0xbe, 0);
const blockSize = 32 * 1024;
const pieceHead = 7;
const kinds = { whole: 1, first: 2, middle: 3, last: 4 } as const;

/** The pieces of a record at byte `position` of the file. */
function pieces(record: Uint8Array, position: number): Uint8Array[] {
	const written: Uint8Array[] = [];
	let at = position;
	let begin = 0;
	do {
		let room = blockSize - (at % blockSize);
		if (room < pieceHead) {
			written.push(new Uint8Array(room));
			at += room;
			room = blockSize;
		}
		const end = Math.min(record.length, begin + room - pieceHead);
		const kind =
			begin === 0
				? end === record.length
					? kinds.whole
					: kinds.first
				: end === record.length
					? kinds.last
					: kinds.middle;
		const piece = Buffer.alloc(pieceHead + end - begin);
		piece.set(record.subarray(begin, end), pieceHead);
		piece[6] = kind;
		piece.writeUInt16LE(end - begin, 4);
		piece.writeUInt32LE(crc32(piece.subarray(6)), 0);
		written.push(piece);
		at += piece.length;
		begin = end;
	} while (begin < record.length);
	return written;
}

interface LoggedRecord {
	readonly bytes: Uint8Array;
	/** Byte of the file after the record. */
	readonly end: number;
}

/** Whole records of an open file, up to the first incomplete or damaged record. */
function* recordsOf(descriptor: number): Generator<LoggedRecord> {
	const take = (position: number, length: number): Buffer | null => {
		const bytes = Buffer.alloc(length);
		return readSync(descriptor, bytes, 0, length, position) === length ? bytes : null;
	};
	let parts: Buffer[] = [];
	for (let at = head.length; ; ) {
		const room = blockSize - (at % blockSize);
		if (room < pieceHead) at += room;
		const about = take(at, pieceHead);
		if (about === null) return;
		const [kind, length] = [about[6]!, about.readUInt16LE(4)];
		const bytes = take(at + pieceHead, length);
		if (bytes === null || crc32(bytes, crc32(Uint8Array.of(kind))) !== about.readUInt32LE(0)) return;
		const opens = kind === kinds.whole || kind === kinds.first;
		if (opens !== (parts.length === 0)) return;
		parts.push(bytes);
		at += pieceHead + length;
		if (kind !== kinds.whole && kind !== kinds.last) continue;
		yield { bytes: Buffer.concat(parts), end: at };
		parts = [];
	}
}

export class TransactionLog implements Disposable {
	readonly #descriptor: number;
	#position: number;

	private constructor(descriptor: number, position: number) {
		this.#descriptor = descriptor;
		this.#position = position;
	}

	/** Creates a file, which must not exist. */
	static create(path: string): TransactionLog {
		const descriptor = openSync(path, "wx");
		writeSync(descriptor, head);
		return new TransactionLog(descriptor, head.length);
	}

	/** Opens a file for appending; it is truncated at the first record that is incomplete, damaged, or refused by `keeps`. */
	static goOn(path: string, keeps: (record: Uint8Array) => boolean): TransactionLog {
		const descriptor = openSync(path, "r+");
		writeSync(descriptor, head, 0, head.length, 0);
		let end = head.length;
		for (const record of recordsOf(descriptor)) {
			if (!keeps(record.bytes)) break;
			end = record.end;
		}
		ftruncateSync(descriptor, end);
		return new TransactionLog(descriptor, end);
	}

	/** Appends records. Throws if the disk has no room for all of them. */
	append(records: readonly Uint8Array[]): void {
		const all: Uint8Array[] = [];
		let at = this.#position;
		for (const record of records) {
			for (const piece of pieces(record, at)) {
				all.push(piece);
				at += piece.length;
			}
		}
		const bytes = Buffer.concat(all);
		if (writeSync(this.#descriptor, bytes, 0, bytes.length, this.#position) !== bytes.length) {
			throw new Error("the disk is full");
		}
		this.#position = at;
	}

	[Symbol.dispose](): void {
		fsyncSync(this.#descriptor);
		closeSync(this.#descriptor);
	}
}
