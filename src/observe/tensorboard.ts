/**
 * TensorBoard events with Megatron's scalar names (docs/spec/runtime.md §6.3): each has a twin "NAME vs samples" whose
 * x is the number of consumed samples. Scalars that Megatron lacks (modules, memory by rank) have names of their own
 * without twins.
 */
import { EventFile, type Histogram } from "./event-file.ts";
import type { EvaluationReport, Observer, StepReport, TimersReport } from "./report.ts";

export interface TensorBoardOptions {
	readonly folder: string;
	/** Steps between points. */
	readonly interval: number;
	/** Iteration time and throughput, at steps that are logged. */
	readonly timers: boolean;
	readonly logInterval: number;
	/** Megatron's operations of a step; null leaves the throughput out. */
	readonly flopsPerStep: number | null;
	readonly worldSize: number;
}

export class TensorBoard implements Observer {
	readonly #options: TensorBoardOptions;
	readonly #events: EventFile;
	/** The first step of the process: its iteration time is not written, because it includes the start. */
	#first = true;

	constructor(options: TensorBoardOptions) {
		this.#options = options;
		this.#events = new EventFile(options.folder);
	}

	step(report: StepReport): void {
		const { interval, timers, logInterval, flopsPerStep, worldSize } = this.#options;
		const first = this.#first;
		this.#first = false;
		if (report.iteration % interval !== 0) return;
		const twinned: (readonly [string, number])[] = [
			["learning-rate", report.nextLearningRate],
			["batch-size", report.globalBatchSize],
			...Object.entries(report.losses),
			["loss-scale", report.lossScale],
		];
		if (report.gradNorm !== null) twinned.push(["grad-norm", report.gradNorm]);
		if (report.numZeros !== null) twinned.push(["num-zeros", report.numZeros]);
		if (report.paramsNorm !== null) twinned.push(["params-norm", report.paramsNorm]);
		const alone: (readonly [string, number])[] = [];
		if (report.skippedSamples > 0) alone.push(["skipped-train-samples", report.skippedSamples]);
		if (report.padding !== undefined) alone.push(["padding", report.padding]);
		if (timers && !first && report.iteration % logInterval === 0) {
			alone.push(["iteration-time", report.seconds]);
			if (flopsPerStep !== null) alone.push(["throughput", flopsPerStep / (report.seconds * 1e12 * worldSize)]);
		}
		alone.push(...moduleScalars(report), ...memoryScalars(report));
		for (const [name, values] of Object.entries(report.layerLosses ?? {})) {
			for (const [layer, value] of values) alone.push([`moe/${name}_layer_${layer}`, value]);
		}
		this.#events.write(report.iteration, [...twinned, ...alone], expertHistograms(report));
		this.#events.write(
			report.consumedSamples,
			twinned.map(([name, value]) => [`${name} vs samples`, value] as const),
		);
	}

	evaluation({ iteration, consumedSamples, split, losses }: EvaluationReport): void {
		const named = Object.entries(losses).flatMap(([name, loss]) => [
			[`${name} ${split}`, loss] as const,
			[`${name} ${split} ppl`, Math.exp(Math.min(20, loss))] as const,
		]);
		this.#events.write(iteration, named);
		if (consumedSamples === undefined) return;
		this.#events.write(
			consumedSamples,
			named.map(([name, value]) => [`${name} vs samples`, value] as const),
		);
	}

	/** The slowest rank's, in seconds. */
	timers({ iteration, seconds }: TimersReport): void {
		if (!this.#options.timers) return;
		const slowest = [...seconds].map(([name, ranks]) => [`${name}-time`, Math.max(...ranks)] as const);
		this.#events.write(
			iteration,
			slowest.filter(([, value]) => value > 0),
		);
	}

	note(): void {}

	close(): void {
		this.#events.close();
	}
}

function* moduleScalars({ modules }: StepReport): Generator<readonly [string, number]> {
	for (const { name, seconds, flops, ranks } of modules ?? []) {
		for (const [part, value] of Object.entries(seconds)) yield [`${name}/${part}-time`, value];
		const step = Object.values(seconds).reduce((sum, value) => sum + value, 0);
		if (flops > 0) yield [`${name}/throughput`, flops / (step * 1e12 * ranks)];
	}
}

/** The largest over the ranks under Megatron's names, and every rank's peak. */
function* memoryScalars({ memory }: StepReport): Generator<readonly [string, number]> {
	if (!memory || memory.length === 0) return;
	yield ["mem-reserved-bytes", Math.max(...memory.map(({ reserved }) => reserved))];
	yield ["mem-allocated-bytes", Math.max(...memory.map(({ allocated }) => allocated))];
	yield ["mem-max-allocated-bytes", Math.max(...memory.map(({ peak }) => peak))];
	for (const [rank, { peak }] of memory.entries()) yield [`memory/rank_${rank}_peak-bytes`, peak];
}

/** Tokens by expert: bucket e is expert e. */
function* expertHistograms({ tokensPerExpert }: StepReport): Generator<readonly [string, Histogram]> {
	for (const [layer, counts] of tokensPerExpert ?? []) {
		yield [`moe/tokens_per_expert_layer_${layer}`, { limits: counts.map((_, expert) => expert + 1), counts }];
	}
}
