/**
 * Reads a run's JSON log, also while it is being written, line by line in bounded memory, into the series of a report.
 * A line is a step (with `iteration`), an evaluation (with `iteration` and `split`) or an event (with `event`).
 */
import { readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../system/errors.ts";
import { InputFile, linesOf } from "../../system/input-file.ts";
import { largestOf, Series } from "../series.ts";
import {
	type CheckedFields,
	checkedFields,
	type Entry,
	entryText,
	LARGEST_LOG_LINE,
	type LoggedTopology,
	parseEntry,
} from "./entry.ts";
import { addFamily, type LoggedBudget, seriesOfFamily } from "./family.ts";
import { type SampleRecord, samplesOf } from "./writer.ts";

/** An event of the log; consecutive events of one kind are merged. */
export interface LoggedEvent {
	readonly kind: string;
	/** Number of steps done before the event. */
	readonly step: number;
	readonly time: string | null;
	/** Sentence of the latest merged event. */
	sentence: string;
	times: number;
	/** Number of steps done before the latest merged event. */
	lastStep: number;
}

export interface LoggedEvaluation {
	readonly step: number;
	readonly split: string;
	readonly losses: Readonly<Record<string, number>>;
}

export interface LoggedSamples {
	/** Number of steps done before. */
	readonly step: number;
	readonly sentence: string;
	readonly records: readonly SampleRecord[];
}

/** The series of a module. */
export interface ModuleSeries {
	readonly name: string;
	ranks: number;
	/** Milliseconds by part of the step, in the log's order. */
	readonly parts: Map<string, Series>;
	/** TFLOP/s of a rank. */
	readonly rate: Series;
	/** Number of steps in which a rank was the module's slowest, by rank. */
	readonly slowest: Map<number, number>;
	/** The longest run of steps with the same slowest rank; null before a second step. */
	streak: Streak | null;
	/** The current run of steps with the same slowest rank. */
	current: Streak | null;
}

/** A run of steps, `first` to `last`. The same rank was its module's slowest in each. */
export interface Streak {
	readonly rank: number;
	readonly first: number;
	readonly last: number;
	/** Milliseconds of work in the first step: of the rank, and the mean of its module's ranks. */
	readonly busy: number;
	readonly mean: number;
}

export interface RunLog {
	readonly file: string;
	readonly bytes: number;
	/** Event of the latest start of the run; null in logs without such an event. */
	readonly start: Entry | null;
	/** Of the latest start; null: the log does not say. */
	readonly topology: LoggedTopology | null;
	readonly steps: number;
	readonly lastStep: number;
	readonly firstTime: string | null;
	readonly lastTime: string | null;
	readonly last: Readonly<Record<string, unknown>> | null;
	/** Losses and norms by name. */
	readonly values: ReadonlyMap<string, Series>;
	/** Losses of evaluations on the validation part, by name. */
	readonly validation: ReadonlyMap<string, Series>;
	readonly learningRate: Series;
	readonly stepMilliseconds: Series;
	readonly tokensPerSecond: Series;
	readonly modules: ReadonlyMap<string, ModuleSeries>;
	/** Peak bytes by rank. */
	readonly memory: CheckedFields["memory"];
	/** Tokens by layer and expert over all steps. */
	readonly experts: ReadonlyMap<number, readonly number[]>;
	/** Busiest expert over the mean, by layer. */
	readonly imbalance: ReadonlyMap<number, Series>;
	readonly evaluations: readonly LoggedEvaluation[];
	/** Submodels of an elastic run by budget. */
	readonly family: ReadonlyMap<number, LoggedBudget>;
	/** The latest held-out samples that the model answered; null: none. */
	readonly samples: LoggedSamples | null;
	readonly events: readonly LoggedEvent[];
	/** Number of events that are not kept. */
	readonly eventsLeftOut: number;
	/** Number of whole lines that are not JSON objects. */
	readonly damaged: number;
	/** Number of earlier runs in the file, which are not read. */
	readonly earlierRuns: number;
}

/** Most evaluations and events that are kept. */
const kept = 1000;

/** The log at `path`: the file, or the newest log in the folder. */
export function findLog(path: string): string {
	let folder: boolean;
	try {
		folder = statSync(path).isDirectory();
	} catch {
		throw new UserError(`${path}: there is no such log file or run folder.`);
	}
	if (!folder) return path;
	const logs = readdirSync(path)
		.filter((name) => /\.jsonl?$/.test(name))
		.map((name) => join(path, name))
		.filter((file) => looksLikeLog(file))
		.sort((a, b) => statSync(b).mtimeMs - statSync(a).mtimeMs);
	if (logs.length === 0) throw new UserError(`${path} holds no JSON log (*.jsonl, *.json) of a run.`);
	return logs[0]!;
}

function looksLikeLog(file: string): boolean {
	try {
		using opened = InputFile.open(file);
		const head = Buffer.from(opened.read(0, Math.min(256, opened.size)));
		return /^\{"(iteration|event)":/.test(head.toString("utf8"));
	} catch {
		return false;
	}
}

const numberOf = (value: unknown): number => (typeof value === "number" ? value : Number.NaN);
const textOf = (value: unknown): string | null => (typeof value === "string" ? value : null);

/** Kinds of events that may occur with every step. */
const counts = new Set(["data", "skipped", "not finite"]);

/** Fields of a step that are not losses. */
const counted = new Set([
	"iteration",
	"consumed_samples",
	"skipped_samples",
	"global_batch_size",
	"tokens",
	"padding",
	"learning_rate",
	"next_learning_rate",
	"loss_scale",
	"skipped",
	"elapsed_ms",
	"tokens_per_second",
]);

/** The start event of a training from step 0, as JsonLog writes it. */
export const newRun = /^\{"event":"start","step":0,/;

class Reader {
	readonly values = new Map<string, Series>();
	readonly validation = new Map<string, Series>();
	readonly learningRate = new Series();
	readonly stepMilliseconds = new Series();
	readonly tokensPerSecond = new Series();
	readonly modules = new Map<string, ModuleSeries>();
	readonly experts = new Map<number, number[]>();
	readonly imbalance = new Map<number, Series>();
	readonly evaluations: LoggedEvaluation[] = [];
	readonly family = new Map<number, LoggedBudget>();
	readonly events: LoggedEvent[] = [];
	memory: RunLog["memory"] = [];
	samples: LoggedSamples | null = null;
	start: Entry | null = null;
	topology: LoggedTopology | null = null;
	last: Entry | null = null;
	steps = 0;
	lastStep = 0;
	firstTime: string | null = null;
	lastTime: string | null = null;
	eventsLeftOut = 0;
	damaged = 0;
	/** Whether the next step is the first of a new run. */
	#new = true;

	/** `name`: the line in sentences. */
	read(line: Buffer, name: string): void {
		const text = entryText(line, name);
		if (text.trim() === "") return;
		const entry = parseEntry(text);
		if (entry === null) this.damaged++;
		else this.#take(entry, checkedFields(entry, name), name);
	}

	#take(entry: Entry, fields: CheckedFields, name: string): void {
		const time = textOf(entry.time);
		this.firstTime ??= time;
		this.lastTime = time ?? this.lastTime;
		if (typeof entry.event === "string") this.#event(entry, fields, entry.event);
		else if (typeof entry.split === "string") this.#evaluation(entry, entry.split);
		else if (typeof entry.iteration === "number") this.#step(entry, fields, entry.iteration, name);
	}

	#event(entry: Entry, { topology }: CheckedFields, kind: string): void {
		if (kind === "start") {
			this.start = entry;
			this.topology = topology;
			this.#new = entry.step === 0;
		}
		const step = Number.isFinite(numberOf(entry.step)) ? numberOf(entry.step) : this.lastStep;
		if (kind === "budgets") {
			addFamily(this.family, step, entry.budgets);
			return;
		}
		if (kind === "samples") {
			this.samples = { step, sentence: textOf(entry.sentence) ?? "", records: samplesOf(entry.samples) };
			return;
		}
		this.#note({ kind, step, time: textOf(entry.time), sentence: textOf(entry.sentence) ?? "" });
	}

	/** Adds an event, or merges it with an earlier event that differs only in numbers. */
	#note(event: Pick<LoggedEvent, "kind" | "step" | "time" | "sentence">): void {
		const words = ({ kind, sentence }: Pick<LoggedEvent, "kind" | "sentence">) =>
			`${kind} ${sentence.replaceAll(/\d+/g, "")}`;
		// A step may bring several; what is no such event ends a row of them.
		const row = this.events.slice(this.events.findLastIndex(({ kind }) => !counts.has(kind)) + 1);
		const before = counts.has(event.kind) ? row.findLast((one) => words(one) === words(event)) : undefined;
		if (before !== undefined) {
			before.times++;
			before.sentence = event.sentence;
			before.lastStep = event.step;
		} else if (this.events.length < kept) this.events.push({ ...event, times: 1, lastStep: event.step });
		else this.eventsLeftOut++;
	}

	#evaluation(entry: Entry, split: string): void {
		const losses = Object.fromEntries(
			Object.entries(entry).filter(([name, value]) => name !== "iteration" && typeof value === "number"),
		) as Record<string, number>;
		const step = numberOf(entry.iteration);
		if (this.evaluations.length === kept) this.evaluations.splice(1, 1);
		this.evaluations.push({ step, split, losses });
		if (split !== "validation") return;
		for (const [name, value] of Object.entries(losses)) seriesOf(this.validation, name).add(step, value);
	}

	#step(entry: Entry, fields: CheckedFields, step: number, name: string): void {
		const time = textOf(entry.time);
		if (step <= this.lastStep && this.steps > 0) {
			this.#rewind(step);
			// A log has every step of its run. The steps of a new run do not repeat those of an earlier run.
			if (!this.#new) this.steps = Math.max(0, this.steps - (this.lastStep - step + 1));
		}
		this.#new = false;
		this.steps++;
		this.lastStep = step;
		this.last = entry;
		for (const [field, value] of Object.entries(entry)) {
			if (counted.has(field)) continue;
			if (typeof value === "number") seriesOf(this.values, field).add(step, value);
			else if (value === "NaN" || value === "Infinity" || value === "-Infinity") {
				this.#note({ kind: "not finite", step, time, sentence: `${field} is ${value}` });
			}
		}
		if (entry.skipped === true) this.#note({ kind: "skipped", step, time, sentence: "the update was left out" });
		this.learningRate.add(step, numberOf(entry.learning_rate));
		this.stepMilliseconds.add(step, numberOf(entry.elapsed_ms));
		this.tokensPerSecond.add(step, numberOf(entry.tokens_per_second));
		for (const module of fields.modules) this.#module(step, module.name, module);
		if (fields.memory.length > 0) this.memory = fields.memory;
		for (const [layer, counts] of fields.experts) {
			if ((this.experts.get(layer)?.length ?? counts.length) !== counts.length) {
				throw new UserError(`${name}: layer ${layer} of tokens_per_expert has another number of experts than before.`);
			}
			this.#experts(step, layer, counts);
		}
	}

	#module(step: number, name: string, entry: Entry): void {
		if (!this.modules.has(name)) {
			this.modules.set(name, {
				name,
				ranks: 0,
				parts: new Map(),
				rate: new Series(),
				slowest: new Map(),
				streak: null,
				current: null,
			});
		}
		const module = this.modules.get(name)!;
		module.ranks = numberOf(entry.ranks);
		for (const [field, value] of Object.entries(entry)) {
			const part = /^(\w+)_ms$/.exec(field)?.[1];
			if (part === undefined || part === "slowest_busy") continue;
			if (!module.parts.has(part)) module.parts.set(part, new Series());
			module.parts.get(part)!.add(step, numberOf(value));
		}
		module.rate.add(step, numberOf(entry.tflops_per_rank));
		const slowest = numberOf(entry.slowest_rank);
		if (!Number.isFinite(slowest)) return;
		module.slowest.set(slowest, (module.slowest.get(slowest) ?? 0) + 1);
		const waited = (numberOf(entry.bridge_ms) || 0) + (numberOf(entry.wait_ms) || 0);
		const all = Object.entries(entry).flatMap(([field, value]) =>
			field.endsWith("_ms") && field !== "slowest_busy_ms" ? [numberOf(value)] : [],
		);
		const mean = all.reduce((sum, value) => sum + value, 0) - waited;
		const busy = numberOf(entry.slowest_busy_ms);
		const goesOn = module.current?.rank === slowest;
		module.current = goesOn
			? { ...module.current!, last: step }
			: { rank: slowest, first: step, last: step, busy, mean };
		const length = (one: Streak | null) => (one === null ? 0 : one.last - one.first);
		if (length(module.current) > length(module.streak)) module.streak = module.current;
	}

	#experts(step: number, layer: number, counts: readonly number[]): void {
		const sums = this.experts.get(layer) ?? counts.map(() => 0);
		counts.forEach((count, expert) => {
			sums[expert]! += count;
		});
		this.experts.set(layer, sums);
		const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length;
		if (!this.imbalance.has(layer)) this.imbalance.set(layer, new Series());
		if (mean > 0) this.imbalance.get(layer)!.add(step, largestOf(counts) / mean);
	}

	/** Removes the steps that a resumed run repeats. */
	#rewind(step: number): void {
		const alone = [this.learningRate, this.stepMilliseconds, this.tokensPerSecond];
		const all = [...alone, ...this.values.values(), ...this.validation.values(), ...this.imbalance.values()];
		all.push(...seriesOfFamily(this.family));
		const again = this.evaluations.findIndex((evaluation) => evaluation.step >= step);
		if (again >= 0) this.evaluations.splice(again);
		for (const module of this.modules.values()) all.push(...module.parts.values(), module.rate);
		for (const series of all) series.rewind(step);
	}
}

function seriesOf(all: Map<string, Series>, name: string): Series {
	if (!all.has(name)) all.set(name, new Series());
	return all.get(name)!;
}

/** Reads the latest run of a log; with `allRuns` all its runs as one. */
export function readRunLog(path: string, options: { readonly allRuns?: boolean } = {}): RunLog {
	const file = findLog(path);
	let reader = new Reader();
	let earlierRuns = 0;
	for (const { number, bytes } of linesOf(file, { limit: LARGEST_LOG_LINE, unended: false })) {
		if (!options.allRuns && reader.lastTime !== null && newRun.test(bytes.toString("latin1", 0, 64))) {
			reader = new Reader();
			earlierRuns++;
		}
		reader.read(bytes, `${file}, line ${number}`);
	}
	if (reader.steps === 0 && reader.events.length === 0) {
		throw new UserError(`${file} holds no steps of a run yet, or is not a JSON log.`);
	}
	return { ...reader, file, bytes: statSync(file).size, earlierRuns };
}
