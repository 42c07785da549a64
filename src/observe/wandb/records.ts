/** Records of a W&B run, field numbers as in wandb/proto/wandb_internal.proto. Times are milliseconds since 1970. */

import { closeSync, fsyncSync, ftruncateSync, openSync, readSync, writeSync } from "node:fs";
import { crc32 } from "node:zlib";
import { fields, Message } from "../protobuf.ts";

/** Field numbers of Record by kind. */
const kinds = {
	history: 2,
	summary: 3,
	config: 5,
	files: 6,
	outputRaw: 13,
	run: 17,
	exit: 18,
	header: 21,
	preempting: 23,
	environment: 26,
} as const;

export type RecordKind = keyof typeof kinds;
/** Makes a record with a given number. */
export type NumberedRecord = (number: number) => Uint8Array;

const recordOf =
	(kind: RecordKind, content: Message): NumberedRecord =>
	(number) =>
		new Message().varint(1, number).message(kinds[kind], content).encoded();

/** JSON in Python's form, with NaN and Infinity, as W&B reads it. */
const jsonOf = (value: unknown): string =>
	typeof value === "number" && !Number.isFinite(value) ? String(value) : JSON.stringify(value);

const timestamp = (milliseconds: number): Message =>
	new Message().varint(1, Math.floor(milliseconds / 1000)).varint(2, Math.round((milliseconds % 1000) * 1e6));

/** A HistoryItem, SummaryItem or ConfigItem: nested_key = 2, value_json = 16. */
const item = (name: string, value: unknown): Message => new Message().text(2, name).text(16, jsonOf(value));

function itemsOf(values: Iterable<readonly [string, unknown]>, field = 1): Message {
	const message = new Message();
	for (const [name, value] of values) message.message(field, item(name, value));
	return message;
}

/** The file's first record: the program that wrote it, and the oldest server version that reads it. */
export const header = (producer: string): NumberedRecord =>
	recordOf("header", new Message().message(1, new Message().text(1, producer).text(2, "0.70.0")));

export interface RunFields {
	readonly id: string;
	readonly entity: string | null;
	readonly project: string | null;
	readonly name: string | null;
	readonly host: string;
	readonly began: number;
	readonly configuration: Readonly<Record<string, unknown>>;
}

/** RunRecord: run_id = 1, entity = 2, project = 3, config = 4, display_name = 8, host = 13, start_time = 17. */
export function run({ id, entity, project, name, host, began, configuration }: RunFields): NumberedRecord {
	const message = new Message().text(1, id);
	if (entity !== null) message.text(2, entity);
	if (project !== null) message.text(3, project);
	message.message(4, itemsOf(Object.entries(configuration)));
	if (name !== null) message.text(8, name);
	return recordOf("run", message.text(13, host).message(17, timestamp(began)));
}

/** ConfigRecord: update = 1. */
export const config = (configuration: Readonly<Record<string, unknown>>): NumberedRecord =>
	recordOf("config", itemsOf(Object.entries(configuration)));

export interface EnvironmentFields {
	readonly system: string;
	readonly began: number;
	readonly arguments: readonly string[];
	readonly host: string;
	readonly user: string;
	readonly executable: string;
	readonly cores: number;
	/** Identifier of this process. */
	readonly writer: string;
}

/** EnvironmentRecord: facts about the machine for W&B's overview. */
export function environment(about: EnvironmentFields): NumberedRecord {
	const message = new Message().text(1, about.system).message(3, timestamp(about.began));
	for (const argument of about.arguments) message.text(5, argument);
	message.text(6, "mimo").text(12, about.host).text(13, about.user).text(14, about.executable);
	return recordOf("environment", message.varint(17, about.cores).text(199, about.writer));
}

/** FilesRecord: a file below files/ that is uploaded at the end (policy END = 1, type WANDB = 1). */
export const file = (path: string): NumberedRecord =>
	recordOf("files", new Message().message(1, new Message().text(1, path).varint(2, 1).varint(3, 1)));

/** HistoryRecord: item = 1, step = 2. */
export function history(step: number, values: Iterable<readonly [string, unknown]>): NumberedRecord {
	return recordOf("history", itemsOf(values).message(2, new Message().varint(1, step)));
}

/** SummaryRecord: update = 1. */
export const summary = (values: Iterable<readonly [string, unknown]>): NumberedRecord =>
	recordOf("summary", itemsOf(values));

/** OutputRawRecord: a line of the Logs tab (STDOUT = 1). */
export const output = (line: string, at: number): NumberedRecord =>
	recordOf("outputRaw", new Message().varint(1, 1).message(2, timestamp(at)).text(3, `${line}\n`));

/** The record of a run that stops and will be resumed. */
export const preempting = (): NumberedRecord => recordOf("preempting", new Message());

/** RunExitRecord: exit_code = 1, runtime = 2 in seconds. */
export const exit = (code: number, runtime: number): NumberedRecord =>
	recordOf("exit", new Message().varint(1, code).varint(2, Math.max(0, Math.round(runtime))));

export interface ReadRecord {
	readonly number: number;
	/** null: another kind. */
	readonly kind: RecordKind | null;
	/** Step of a history record. */
	readonly step: number | null;
	/** Start of a run record. */
	readonly began: number | null;
}

/** The fields of a record that continuing its file needs. Throws a UserError that names `path` for a damaged record. */
export function readRecord(record: Uint8Array, path: string): ReadRecord {
	const inside = (message: Uint8Array, field: number) =>
		[...fields(message, path)].find(({ number }) => number === field);
	let [number, step, began]: [number, number | null, number | null] = [0, null, null];
	let kind: RecordKind | null = null;
	for (const field of fields(record, path)) {
		if (field.number === 1) number = field.value;
		const named = Object.entries(kinds).find(([, value]) => value === field.number);
		if (named === undefined) continue;
		kind = named[0] as RecordKind;
		if (kind === "history") step = inside(inside(field.bytes, 2)?.bytes ?? field.bytes, 1)?.value ?? null;
		if (kind === "run") began = 1000 * (inside(inside(field.bytes, 17)?.bytes ?? new Uint8Array(0), 1)?.value ?? 0);
	}
	return { number, kind, step, began };
}

// The file run-ID.wandb (core/pkg/leveldb/record.go of wandb): 7 bytes of head, then LevelDB's log format. Blocks of 32 KiB,
// the first with the header, hold pieces of records: checksum (CRC-32 of kind and bytes), length, kind, bytes. A piece lies in a
// single block; the end of a block that is shorter than a piece's header is zeros. Records that are added together are one write.

/** ":W&B", 0xBEE1, version 0. */
const head = Uint8Array.of(0x3a, 0x57, 0x26, 0x42, 0xe1, 0xbe, 0);
const blockSize = 32 * 1024;
const pieceHead = 7;
const pieceKinds = { whole: 1, first: 2, middle: 3, last: 4 } as const;

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
					? pieceKinds.whole
					: pieceKinds.first
				: end === record.length
					? pieceKinds.last
					: pieceKinds.middle;
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
		const opens = kind === pieceKinds.whole || kind === pieceKinds.first;
		if (opens !== (parts.length === 0)) return;
		parts.push(bytes);
		at += pieceHead + length;
		if (kind !== pieceKinds.whole && kind !== pieceKinds.last) continue;
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
