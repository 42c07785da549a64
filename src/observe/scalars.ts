/**
 * A run's scalar series under Megatron's names (docs/spec/runtime.md §6.3), for TensorBoard, MLflow and Weights & Biases. Series
 * that Megatron lacks (modules, balancing losses by layer) have other names.
 */
import type { EvaluationReport, StepReport, TimersReport } from "./step-report.ts";

export type Scalar = readonly [name: string, value: number];

export interface ScalarOptions {
	/** Number of steps between points. */
	readonly interval: number;
	/** Whether points have iteration time, throughput and timers. */
	readonly timers: boolean;
	readonly logInterval: number;
	/** Megatron's operations of a step; null leaves the throughput out. */
	readonly flopsPerStep: number | null;
	readonly worldSize: number;
}

export interface StepScalars {
	/** Scalars that Megatron writes over steps and over samples. */
	readonly twinned: readonly Scalar[];
	readonly alone: readonly Scalar[];
}

export class Scalars {
	/** Whether the process is at its first step, whose iteration time is omitted because it includes the start. */
	#first = true;

	constructor(private readonly options: ScalarOptions) {}

	/** Called for every step; null where the step has no point. */
	step(report: StepReport): StepScalars | null {
		const { interval, timers, logInterval, flopsPerStep, worldSize } = this.options;
		const first = this.#first;
		this.#first = false;
		if (report.iteration % interval !== 0) return null;
		const twinned: Scalar[] = [
			["learning-rate", report.nextLearningRate],
			["batch-size", report.globalBatchSize],
			...Object.entries(report.losses),
			["loss-scale", report.lossScale],
		];
		if (report.gradNorm !== null) twinned.push(["grad-norm", report.gradNorm]);
		if (report.numZeros !== null) twinned.push(["num-zeros", report.numZeros]);
		if (report.paramsNorm !== null) twinned.push(["params-norm", report.paramsNorm]);
		const alone: Scalar[] = [];
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
		return { twinned, alone };
	}

	evaluation({ split, losses }: EvaluationReport): Scalar[] {
		return Object.entries(losses).flatMap(([name, loss]): Scalar[] => [
			[`${name} ${split}`, loss],
			[`${name} ${split} ppl`, Math.exp(Math.min(20, loss))],
		]);
	}

	/** Seconds of the slowest rank for each timer; empty without timers. */
	timers({ seconds }: TimersReport): Scalar[] {
		if (!this.options.timers) return [];
		return [...seconds]
			.map(([name, ranks]): Scalar => [`${name}-time`, Math.max(...ranks)])
			.filter(([, value]) => value > 0);
	}
}

function* moduleScalars({ modules }: StepReport): Generator<Scalar> {
	for (const { name, seconds, flops, ranks } of modules ?? []) {
		for (const [part, value] of Object.entries(seconds)) yield [`${name}/${part}-time`, value];
		const step = Object.values(seconds).reduce((sum, value) => sum + value, 0);
		if (flops > 0) yield [`${name}/throughput`, flops / (step * 1e12 * ranks)];
	}
}

/** The largest memory of all ranks. */
function* memoryScalars({ memory }: StepReport): Generator<Scalar> {
	if (!memory || memory.length === 0) return;
	yield ["mem-reserved-bytes", Math.max(...memory.map(({ reserved }) => reserved))];
	yield ["mem-allocated-bytes", Math.max(...memory.map(({ allocated }) => allocated))];
	yield ["mem-max-allocated-bytes", Math.max(...memory.map(({ peak }) => peak))];
}
