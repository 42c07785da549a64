/**
 * Reads scalars from TensorBoard event files: TFRecords (length, checksum, bytes, checksum) of Event protocol buffers.
 * Only step, tag and value of an event are read.
 */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { readWholeFile } from "../../system/input-file.ts";
import { fields } from "../protobuf.ts";

/** Bytes of the largest event file that is read: some ten million scalars. */
const LARGEST_EVENT_FILE = 2 ** 30;

/** Values by tag and step of all event files in a folder; later files take precedence. */
export function readScalars(folder: string): Map<string, Map<number, number>> {
	const files = readdirSync(folder)
		.filter((name) => name.includes("tfevents"))
		.sort();
	if (files.length === 0) throw new UserError(`${folder} holds no TensorBoard event file (…tfevents…).`);
	const scalars = new Map<string, Map<number, number>>();
	for (const name of files) {
		const path = join(folder, name);
		for (const record of records(Buffer.from(readWholeFile(path, LARGEST_EVENT_FILE).buffer), path))
			addEvent(record, scalars, path);
	}
	return scalars;
}

/** Whole records; an incomplete last record, as of a killed writer, is ignored. */
function* records(bytes: Buffer, path: string): Generator<Uint8Array> {
	for (let at = 0; at + 12 <= bytes.length; ) {
		const length = Number(bytes.readBigUInt64LE(at));
		if (maskedCrc(bytes.subarray(at, at + 8)) !== bytes.readUInt32LE(at + 8)) {
			throw new UserError(`${path} is damaged at byte ${at}: a record's length does not match its checksum.`);
		}
		const end = at + 12 + length;
		if (end + 4 > bytes.length) return;
		const record = bytes.subarray(at + 12, end);
		if (maskedCrc(record) !== bytes.readUInt32LE(end)) {
			throw new UserError(`${path} is damaged at byte ${at}: a record does not match its checksum.`);
		}
		yield record;
		at = end + 4;
	}
}

/** Event: step = 2, summary = 5; Summary: value = 1; Value: tag = 1, simple_value = 2, tensor = 8. */
function addEvent(event: Uint8Array, scalars: Map<string, Map<number, number>>, path: string): void {
	let step = 0;
	const values: Uint8Array[] = [];
	for (const { number, value, bytes } of fields(event, path)) {
		if (number === 2) step = value;
		if (number === 5) for (const entry of fields(bytes, path)) if (entry.number === 1) values.push(entry.bytes);
	}
	for (const entry of values) {
		let tag = "";
		let scalar = Number.NaN;
		for (const { number, value, bytes } of fields(entry, path)) {
			if (number === 1) tag = new TextDecoder().decode(bytes);
			if (number === 2) scalar = value;
			if (number === 8) scalar = tensorScalar(bytes, path);
		}
		if (tag === "" || Number.isNaN(scalar)) continue;
		if (!scalars.has(tag)) scalars.set(tag, new Map());
		scalars.get(tag)!.set(step, scalar);
	}
}

/** The value of a TensorProto with one float: tensor_content = 4 or float_val = 5 (packed). */
function tensorScalar(tensor: Uint8Array, path: string): number {
	for (const { number, value, bytes } of fields(tensor, path)) {
		if (number !== 4 && number !== 5) continue;
		if (bytes.length === 0) return value;
		if (bytes.length === 4) return new DataView(bytes.buffer, bytes.byteOffset, 4).getFloat32(0, true);
	}
	return Number.NaN;
}

const crcTable = Uint32Array.from({ length: 256 }, (_, index) => {
	let crc = index;
	for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
	return crc >>> 0;
});

/** TFRecord's masked CRC-32C. */
export function maskedCrc(bytes: Uint8Array): number {
	let crc = 0xffffffff;
	for (let i = 0; i < bytes.length; i++) crc = (crc >>> 8) ^ crcTable[(crc ^ bytes[i]!) & 255]!;
	crc = ~crc >>> 0;
	return (((crc >>> 15) | (crc << 17)) + 0xa282ead8) >>> 0;
}
