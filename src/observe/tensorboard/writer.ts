/**
 * Writes TensorBoard events with Megatron's scalar names (docs/spec/runtime.md §6.3), each over steps and, as "NAME vs samples", over
 * consumed samples. Scalars that Megatron lacks (modules, memory by rank) are only over steps.
 */

import { closeSync, mkdirSync, openSync } from "node:fs";
import { hostname } from "node:os";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { systemReason } from "../../system/system-errors.ts";
import { appendWhole } from "../append.ts";
import { Message } from "../protobuf.ts";
import { type Scalar, type ScalarOptions, Scalars } from "../scalars.ts";
import type { EvaluationReport, Observer, StepReport, TimersReport } from "../step-report.ts";
import { maskedCrc } from "./reader.ts";

export class TensorBoard implements Observer {
	readonly #events: EventFile;
	readonly #scalars: Scalars;

	constructor(options: ScalarOptions & { readonly folder: string }) {
		this.#events = new EventFile(options.folder);
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
