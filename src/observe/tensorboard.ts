/**
 * TensorBoard event files. A run writes events with Megatron's scalar names (docs/spec/runtime.md §6.3), each over steps and, as "NAME vs samples", over
 * consumed samples. Scalars that Megatron lacks (modules, memory by rank) are only over steps.
 */
import { closeSync, mkdirSync, openSync, readdirSync } from "node:fs";
import { hostname } from "node:os";
import { join } from "node:path";
import { UserError } from "../system/errors.ts";
import { readWholeFile } from "../system/input-file.ts";
import { systemReason } from "../system/system-errors.ts";
import { fields, Message } from "./protobuf.ts";
import { appendWhole } from "./record-files.ts";
import { type Scalar, type ScalarOptions, Scalars } from "./scalars.ts";
import type { EvaluationReport, Observer, StepReport, TimersReport } from "./step-report.ts";

export class TensorBoard implements Observer {
	readonly #events: EventFile;
	readonly #scalars: Scalars;

	/** `now`: milliseconds since 1970. */
	constructor(options: ScalarOptions & { readonly folder: string }, now: () => number = Date.now) {
		this.#events = new EventFile(options.folder, () => now() / 1000);
		this.#scalars = new Scalars(options);
	}

	step(report: StepReport): void {
		const scalars = this.#scalars.step(report);
		if (scalars === null) return;
		const { twinned, alone } = scalars;
		this.#events.write(report.iteration, [...twinned, ...alone, ...peakScalars(report)], expertHistograms(report));
		this.#writeTwins(report.consumedSamples, twinned);
	}

	evaluation(report: EvaluationReport): void {
		const scalars = this.#scalars.evaluation(report);
		this.#events.write(report.iteration, scalars);
		if (report.consumedSamples !== undefined) this.#writeTwins(report.consumedSamples, scalars);
	}

	timers(report: TimersReport): void {
		const scalars = this.#scalars.timers(report);
		if (scalars.length > 0) this.#events.write(report.iteration, scalars);
	}

	note(): void {}

	close(): void {
		this.#events.close();
	}

	#writeTwins(samples: number, scalars: readonly Scalar[]): void {
		this.#events.write(
			samples,
			scalars.map(([name, value]): Scalar => [`${name} vs samples`, value]),
		);
	}
}

/** Peak memory of every rank. */
function* peakScalars({ memory }: StepReport): Generator<Scalar> {
	for (const [rank, { peak }] of (memory ?? []).entries()) yield [`memory/rank_${rank}_peak-bytes`, peak];
}

/** Histograms of tokens by expert, where bucket e is expert e. */
function* expertHistograms({ tokensPerExpert }: StepReport): Generator<readonly [string, Histogram]> {
	for (const [layer, counts] of tokensPerExpert ?? []) {
		yield [`moe/tokens_per_expert_layer_${layer}`, { limits: counts.map((_, expert) => expert + 1), counts }];
	}
}

// Writes a TensorBoard event file: TFRecords (length, checksum, bytes, checksum) of Event protocol buffers. Every
// record is a single write, so that a reader finds whole records during the run and after it is killed.

/** Counts of neighbouring buckets; bucket i ends at limits[i]. */
interface Histogram {
	readonly limits: readonly number[];
	readonly counts: readonly number[];
}

/** The TFRecord of a message. */
function recordOf(message: Message): Uint8Array {
	const bytes = message.encoded();
	const record = Buffer.alloc(bytes.length + 16);
	record.writeBigUInt64LE(BigInt(bytes.length), 0);
	record.writeUInt32LE(maskedCrc(record.subarray(0, 8)), 8);
	record.set(bytes, 12);
	record.writeUInt32LE(maskedCrc(record.subarray(12, 12 + bytes.length)), 12 + bytes.length);
	return record;
}

/** HistogramProto: min = 1, max = 2, num = 3, sum = 4, sum_squares = 5, bucket_limit = 6, bucket = 7. */
function histogramMessage({ limits, counts }: Histogram): Message {
	const total = counts.reduce((sum, count) => sum + count, 0);
	const weighted = (power: number) => counts.reduce((sum, count, i) => sum + count * limits[i]! ** power, 0);
	return new Message()
		.double(1, 0)
		.double(2, limits.at(-1) ?? 0)
		.double(3, total)
		.double(4, weighted(1))
		.double(5, weighted(2))
		.doubles(6, limits)
		.doubles(7, counts);
}

export class EventFile {
	readonly path: string;
	readonly #descriptor: number;
	readonly #now: () => number;

	/** Creates a file in `folder`. Throws a UserError if it cannot be created. `now`: seconds since 1970. */
	constructor(folder: string, now: () => number = () => Date.now() / 1000) {
		this.#now = now;
		const started = String(Math.floor(now())).padStart(10, "0");
		this.path = join(folder, `events.out.tfevents.${started}.${hostname()}.${process.pid}.0`);
		try {
			mkdirSync(folder, { recursive: true });
			this.#descriptor = openSync(this.path, "a");
		} catch (error) {
			throw new UserError(`tensorboard-dir ${folder} cannot be written: ${systemReason(error)}.`);
		}
		this.#write(new Message().double(1, now()).text(3, "brain.Event:2"));
	}

	/** Writes all values of a step in one record. Event: wall_time = 1, step = 2, summary = 5; Summary: value = 1. */
	write(
		step: number,
		scalars: Iterable<readonly [tag: string, value: number]>,
		histograms: Iterable<readonly [tag: string, value: Histogram]> = [],
	): void {
		const summary = new Message();
		// Value: tag = 1, simple_value = 2, histo = 5.
		for (const [tag, value] of scalars) summary.message(1, new Message().text(1, tag).float(2, value));
		for (const [tag, value] of histograms) {
			summary.message(1, new Message().text(1, tag).message(5, histogramMessage(value)));
		}
		this.#write(new Message().double(1, this.#now()).varint(2, step).message(5, summary));
	}

	close(): void {
		closeSync(this.#descriptor);
	}

	#write(message: Message): void {
		try {
			appendWhole(this.#descriptor, recordOf(message));
		} catch (error) {
			throw new UserError(`The event file ${this.path} cannot be written: ${systemReason(error)}.`);
		}
	}
}

// Reads scalars from TensorBoard event files: TFRecords (length, checksum, bytes, checksum) of Event protocol
// buffers. Only step, tag and value of an event are read.

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
