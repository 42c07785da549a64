/** Hands the entries of a JSON log to the tracker that records the run: MLflow, Weights & Biases or TensorBoard. */
import { createHash } from "node:crypto";
import { UserError } from "../../system/errors.ts";
import type { ScalarOptions } from "../scalars.ts";
import type { ByLayer, Observer, RunEvent, StepReport, StepSeconds } from "../step-report.ts";
import { type CheckedFields, checkedFields, type Entry, entryText, parseEntry } from "./entry.ts";

/** Opens the record of a run. `configuration`: its keys; `now`: the time of the current entry in milliseconds since 1970. */
export type OpenTracker = (configuration: Entry, scalars: ScalarOptions, now: () => number) => Observer;

const isObject = (value: unknown): value is Entry => typeof value === "object" && value !== null;
const objectOf = (value: unknown): Entry => (isObject(value) ? value : {});
/** A number of the log, in which those that are not finite are texts. */
const numberOf = (value: unknown): number | null =>
	typeof value === "number" ? value : /^(?:NaN|-?Infinity)$/.test(String(value)) ? Number(value) : null;

/** Numbers of a step that are not losses. */
const notLosses = new Set(
	"iteration consumed_samples skipped_samples global_batch_size tokens padding learning_rate next_learning_rate loss_scale grad_norm num_zeros params_norm encoder_participants grad_norm_exact grad_norm_corrected elapsed_ms tokens_per_second".split(
		" ",
	),
);

export class Replay {
	#tracker: Observer | null = null;
	#time = 0;

	constructor(private readonly open: OpenTracker) {}

	/** Whether an entry has begun a run. */
	get begun(): boolean {
		return this.#tracker !== null;
	}

	/** Takes a line of the log, which `name` names in sentences; a torn line, and one before the first start, is passed over. */
	take(line: Uint8Array, name: string): void {
		const entry = parseEntry(entryText(line, name));
		if (entry === null) return;
		const fields = checkedFields(entry, name);
		this.#time = Date.parse(String(entry.time)) || this.#time;
		if (entry.event === "start") this.#begin(entry);
		const iteration = numberOf(entry.iteration) ?? 0;
		if (typeof entry.event === "string") {
			const event = {
				kind: entry.event as RunEvent["kind"],
				step: numberOf(entry.step),
				sentence: String(entry.sentence),
			};
			this.#tracker?.event?.(event);
		} else if (isObject(entry.timers)) {
			const seconds = new Map(
				Object.entries(namedNumbers(entry.timers, name)).map(([timer, value]) => [timer, [value]]),
			);
			this.#tracker?.timers?.({ iteration: numberOf(entry.step) ?? 0, option: "max", seconds });
		} else if (entry.split === "validation" || entry.split === "test") {
			const { iteration: _, ...losses } = namedNumbers(entry, name);
			this.#tracker?.evaluation({ iteration, split: entry.split, label: "", losses });
		} else if (iteration > 0) this.#tracker?.step(stepOf(entry, fields, name));
	}

	close(): void {
		this.#tracker?.close();
	}

	#begin(start: Entry): void {
		this.close();
		const configuration = Object.fromEntries(
			Object.entries(objectOf(start.configuration)).filter(([key]) => /^[\w-]+$/.test(key)),
		);
		const steps = (key: string) => numberOf(configuration[key]) ?? 1;
		const scalars = {
			interval: steps("tensorboard-log-interval"),
			timers: configuration["log-timers-to-tensorboard"] === true,
			logInterval: steps("log-interval"),
			flopsPerStep: numberOf(start.flops_per_step),
			worldSize: numberOf(start.world_size) ?? 1,
		};
		this.#tracker = this.open(configuration, scalars, () => this.#time);
		const given = String(start.training ?? "");
		const training = /^[0-9a-f]{64}$/.test(given)
			? given
			: createHash("sha256").update(String(start.run)).digest("hex");
		const command = Array.isArray(start.arguments) ? start.arguments.map(String) : [];
		this.#tracker.begin?.({ step: numberOf(start.step) ?? 0, training, configuration, arguments: command });
	}
}

/** The numbers of an entry by name. Throws a UserError for a name that would be a path out of a tracker's folder. */
function namedNumbers(entry: Entry, line: string): Record<string, number> {
	const numbers: Record<string, number> = {};
	for (const [name, value] of Object.entries(entry)) {
		const number = numberOf(value);
		if (number === null) continue;
		if (name.split("/").some((part) => ["", ".", ".."].includes(part))) {
			throw new UserError(`${line} is not a log's: ${JSON.stringify(name)} is no name of a value.`);
		}
		numbers[name] = number;
	}
	return numbers;
}

/** The report of a step, as far as trackers record it. */
function stepOf(entry: Entry, { modules, memory, experts }: CheckedFields, line: string): StepReport {
	const all = namedNumbers(entry, line);
	const value = (field: string) => all[field] ?? 0;
	return {
		iteration: value("iteration"),
		consumedSamples: value("consumed_samples"),
		skippedSamples: value("skipped_samples"),
		globalBatchSize: value("global_batch_size"),
		tokens: value("tokens"),
		...("padding" in all && { padding: all.padding }),
		seconds: value("elapsed_ms") / 1000,
		learningRate: value("learning_rate"),
		nextLearningRate: all.next_learning_rate ?? value("learning_rate"),
		losses: Object.fromEntries(Object.entries(all).filter(([name]) => !notLosses.has(name))),
		lossScale: value("loss_scale"),
		gradNorm: all.grad_norm ?? null,
		numZeros: all.num_zeros ?? null,
		paramsNorm: all.params_norm ?? null,
		skipped: entry.skipped === true,
		participation: null,
		modules: modules.map((module) => {
			const parts = Object.entries(namedNumbers(module, line)).flatMap(([field, number]) =>
				field.endsWith("_ms") && field !== "slowest_busy_ms" ? [[field.slice(0, -3), number / 1000] as const] : [],
			);
			const seconds = Object.fromEntries(parts) as unknown as StepSeconds;
			const ranks = numberOf(module.ranks) ?? 1;
			const whole = parts.reduce((sum, [, part]) => sum + part, 0);
			const flops = (numberOf(module.tflops_per_rank) ?? 0) * whole * ranks * 1e12;
			return { name: module.name, ranks, seconds, flops, idle: 0, slowest: { rank: 0, busy: 0 } };
		}),
		memory,
		layerLosses: Object.fromEntries(
			Object.entries(objectOf(entry.layer_losses)).map(([name, layers]): [string, ByLayer<number>] => [
				name,
				new Map(Object.entries(namedNumbers(objectOf(layers), line)).map(([layer, loss]) => [Number(layer), loss])),
			]),
		),
		tokensPerExpert: new Map(experts),
	};
}
