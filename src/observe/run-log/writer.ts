/**
 * Appends a JSON object for each step to a file, with numbers at full precision. Each object is a single write of a whole line, so
 * that a killed run leaves whole lines. Repeated runs write equal fields, except `time`, `elapsed_ms`, `tokens_per_second` and
 * `modules`. Evaluations have a field `split`, events a field `event`; steps have neither. A run begins with an event `start`; at
 * step 0 a new run begins, and the earlier content of the file is moved to another file.
 */
import { randomUUID } from "node:crypto";
import {
	closeSync,
	existsSync,
	fstatSync,
	fsyncSync,
	mkdirSync,
	openSync,
	readSync,
	renameSync,
	writeSync,
} from "node:fs";
import { dirname, join, parse as parsePath } from "node:path";
import { UserError } from "../../system/errors.ts";
import { linesOf } from "../../system/input-file.ts";
import { systemReason } from "../../system/system-errors.ts";
import { appendWhole } from "../record-files.ts";
import type {
	ByLayer,
	EvaluationReport,
	ModuleReport,
	Observer,
	RunEvent,
	StepReport,
	TimersReport,
} from "../step-report.ts";
import { LARGEST_LOG_LINE } from "./entry.ts";

/** Fields of a module in a step: milliseconds by part, rate, slowest rank. */
function moduleFields({ name, ranks, seconds, flops, idle, slowest }: ModuleReport): Record<string, unknown> {
	const whole = Object.values(seconds).reduce((sum, value) => sum + value, 0);
	return {
		name,
		ranks,
		...Object.fromEntries(Object.entries(seconds).map(([part, value]) => [`${part}_ms`, value * 1000])),
		idle,
		...(flops > 0 ? { tflops_per_rank: flops / (whole * ranks * 1e12) } : {}),
		slowest_rank: slowest.rank,
		slowest_busy_ms: slowest.busy * 1000,
	};
}

function byLayer<Value>(values: ByLayer<Value>): Record<string, Value> {
	return Object.fromEntries([...values].map(([layer, value]) => [String(layer), value]));
}

function mapValues<From, To>(values: Readonly<Record<string, From>>, to: (value: From) => To): Record<string, To> {
	return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, to(value)]));
}

/** Turns reports into the lines of a log. */
export abstract class LogLines implements Observer {
	#lastStep = 0;

	/** `always`: fields of every record. */
	constructor(
		private readonly now: () => Date = () => new Date(),
		private readonly always: Readonly<Record<string, unknown>> = {},
	) {}

	/** Writes a line, which has its line end. */
	protected abstract append(line: string): void;

	/** Fields of the start of a run after `step`. */
	protected startFields(_step: number): Readonly<Record<string, unknown>> {
		return {};
	}

	step(report: StepReport): void {
		this.#lastStep = report.iteration;
		this.#write({
			iteration: report.iteration,
			consumed_samples: report.consumedSamples,
			skipped_samples: report.skippedSamples,
			global_batch_size: report.globalBatchSize,
			tokens: report.tokens,
			...(report.padding === undefined ? {} : { padding: report.padding }),
			learning_rate: report.learningRate,
			next_learning_rate: report.nextLearningRate,
			...report.losses,
			loss_scale: report.lossScale,
			grad_norm: report.gradNorm,
			...(report.numZeros === null ? {} : { num_zeros: report.numZeros }),
			...(report.paramsNorm === null ? {} : { params_norm: report.paramsNorm }),
			...(report.participation === null
				? {}
				: {
						encoder_participants: report.participation.participants,
						grad_norm_exact: report.participation.exactNorm,
						grad_norm_corrected: report.participation.correctedNorm,
					}),
			skipped: report.skipped,
			...(report.modules ? { modules: report.modules.map(moduleFields) } : {}),
			...(report.memory ? { memory: report.memory } : {}),
			...(report.layerLosses ? { layer_losses: mapValues(report.layerLosses, byLayer) } : {}),
			...(report.tokensPerExpert ? { tokens_per_expert: byLayer(report.tokensPerExpert) } : {}),
			time: this.now().toISOString(),
			elapsed_ms: report.seconds * 1000,
			tokens_per_second: report.tokens / report.seconds,
		});
	}

	evaluation({ iteration, split, losses }: EvaluationReport): void {
		this.#write({ iteration, split, ...losses, time: this.now().toISOString() });
	}

	note(): void {}

	timers({ iteration, seconds }: TimersReport): void {
		const slowest = Object.fromEntries([...seconds].map(([name, ranks]) => [name, Math.max(...ranks)]));
		this.#write({ timers: slowest, step: iteration, time: this.now().toISOString() });
	}

	event({ kind, step, sentence, details }: RunEvent): void {
		const starts = kind === "start" ? this.startFields(step ?? 0) : {};
		this.#write({
			...{ event: kind, step: step ?? this.#lastStep, ...starts, sentence },
			...details,
			time: this.now().toISOString(),
		});
	}

	abstract close(): void;

	#write(record: Record<string, unknown>): void {
		const line = JSON.stringify({ ...record, ...this.always }, (_, value) =>
			typeof value === "number" && !Number.isFinite(value) ? String(value) : value,
		);
		this.append(`${line}\n`);
	}
}

export class JsonLog extends LogLines {
	readonly #file: string;
	#descriptor: number;
	readonly #note: (sentence: string) => void;

	/**
	 * Opens `file` for appending. `note`: called with a sentence if the log of an earlier run is moved. `always`: fields of every
	 * record. Throws a UserError if the file cannot be opened.
	 */
	constructor(
		file: string,
		now?: () => Date,
		note: (sentence: string) => void = () => {},
		always?: Readonly<Record<string, unknown>>,
	) {
		super(now, always);
		this.#file = file;
		this.#note = note;
		this.#descriptor = this.#attempt(() => {
			mkdirSync(dirname(file), { recursive: true });
			return openSync(file, "a+");
		});
		this.#attempt(() => {
			if (!this.#endsWithNewline()) writeSync(this.#descriptor, "\n");
		});
	}

	close(): void {
		// Devices and pipes cannot be flushed to a disk.
		if (fstatSync(this.#descriptor).isFile()) this.#attempt(() => fsyncSync(this.#descriptor));
		closeSync(this.#descriptor);
	}

	/** The identifier of the run that begins, or continues after `step`. */
	protected override startFields(step: number): { readonly run: string } {
		const stat = fstatSync(this.#descriptor);
		if (step > 0) return { run: (stat.isFile() ? latestRun(this.#file) : null) ?? randomUUID() };
		if (stat.size > 0 && stat.isFile()) this.#attempt(() => this.#moveAway());
		return { run: randomUUID() };
	}

	protected override append(line: string): void {
		this.#attempt(() => appendWhole(this.#descriptor, Buffer.from(line)));
	}

	#moveAway(): void {
		const { dir, name, ext } = parsePath(this.#file);
		const numbered = (number: number) => join(dir, `${name}.${number}${ext}`);
		let number = 1;
		while (existsSync(numbered(number))) number++;
		renameSync(this.#file, numbered(number));
		closeSync(this.#descriptor);
		this.#descriptor = openSync(this.#file, "a+");
		this.#note(`${this.#file} was the log of an earlier run, which was renamed to ${numbered(number)}.`);
	}

	#attempt<Result>(action: () => Result): Result {
		try {
			return action();
		} catch (error) {
			throw new UserError(`The log ${this.#file} cannot be written: ${systemReason(error)}.`);
		}
	}

	#endsWithNewline(): boolean {
		const { size } = fstatSync(this.#descriptor);
		if (size === 0) return true;
		const last = new Uint8Array(1);
		readSync(this.#descriptor, last, 0, 1, size - 1);
		return last[0] === 0x0a;
	}
}

/** The identifier in the last start event of a log; null: the log has no identifier. */
function latestRun(file: string): string | null {
	let run: string | null = null;
	for (const { bytes } of linesOf(file, { limit: LARGEST_LOG_LINE, unended: false })) {
		const line = bytes.toString("utf8");
		if (line.startsWith('{"event":"start"')) run = /"run":"([^"]+)"/.exec(line)?.[1] ?? run;
	}
	return run;
}

// Held-out pictures in the event "samples" of a log: what the data say of them, and what the model wrote.

/** A sample in an event. */
export interface SampleRecord {
	/** A PNG file in base64; null: the sample has no picture, or the log holds none. */
	readonly picture: string | null;
	readonly prompt: string;
	readonly truth: string;
	readonly answer: string;
}

/** Most samples of an event, characters of a text, and characters of a picture. */
export const mostSamples = 12;
const [longest, largest] = [2000, 2 ** 19];

const shortened = (text: string) => (text.length > longest ? `${text.slice(0, longest)} …` : text);

/** The event with the first samples that were answered after `step` steps; `sentence`: how many were right. */
export function samplesEvent(step: number, sentence: string, samples: readonly SampleRecord[]): RunEvent {
	const kept = samples.slice(0, mostSamples).map(({ picture, prompt, truth, answer }) => ({
		picture: picture !== null && picture.length <= largest ? picture : null,
		...{ prompt: shortened(prompt), truth: shortened(truth), answer: shortened(answer) },
	}));
	return { kind: "samples", step, sentence, details: { samples: kept } };
}

/** The samples of an event in a log. Records of another form are ignored. */
export function samplesOf(samples: unknown): SampleRecord[] {
	if (!Array.isArray(samples)) return [];
	return samples.slice(0, mostSamples).flatMap((one: Partial<Record<keyof SampleRecord, unknown>> | null) => {
		const { picture, prompt, truth, answer } = one ?? {};
		if (typeof prompt !== "string" || typeof truth !== "string" || typeof answer !== "string") return [];
		const isPicture = typeof picture === "string" && picture.length <= largest && /^[A-Za-z\d+/]+={0,2}$/.test(picture);
		const texts = { prompt: shortened(prompt), truth: shortened(truth), answer: shortened(answer) };
		return [{ picture: isPicture ? picture : null, ...texts }];
	});
}
