/**
 * Learning rate and weight decay by consumed samples (docs/spec/runtime.md §5). The counter starts at 0 and grows by the global
 * batch size with each step that updates the weights; the next step uses the value at the counter.
 */
import type { TrainingConfiguration } from "../config/schema.ts";

export interface LearningRateSchedule {
	readonly style: TrainingConfiguration["lrDecayStyle"];
	readonly maximum: number;
	readonly minimum: number;
	/** Learning rate at sample 0 of the warm-up. */
	readonly warmupInit: number;
	/** W: samples of the warm-up; may be fractional. */
	readonly warmupSamples: number;
	/** X: samples after which the minimum learning rate holds. */
	readonly decaySamples: number;
	/** The annealing phase of WSD: its shape, and A, its length in samples. */
	readonly annealStyle: TrainingConfiguration["lrWsdDecayStyle"];
	readonly annealSamples: number;
}

export interface WeightDecaySchedule {
	readonly style: TrainingConfiguration["weightDecayIncrStyle"];
	readonly start: number;
	readonly end: number;
	readonly rampSamples: number;
}

/** Factor between the maximum (1, at progress 0) and the minimum (0, at progress 1). */
function annealFactor(style: LearningRateSchedule["annealStyle"], progress: number): number {
	switch (style) {
		case "linear":
			return 1 - progress;
		case "cosine":
			return (Math.cos(Math.PI * progress) + 1) / 2;
		case "exponential":
			return 2 * 0.5 ** progress - 1;
		case "minus_sqrt":
			return 1 - Math.sqrt(progress);
	}
}

function decayFactor(schedule: LearningRateSchedule, style: "linear" | "cosine" | "WSD", samples: number): number {
	const { warmupSamples, decaySamples, annealSamples, annealStyle } = schedule;
	if (style !== "WSD") return annealFactor(style, (samples - warmupSamples) / (decaySamples - warmupSamples));
	const stable = decaySamples - annealSamples;
	return samples <= stable ? 1 : annealFactor(annealStyle, (samples - stable) / annealSamples);
}

/** Learning rate after `samples` samples. */
export function learningRateAt(schedule: LearningRateSchedule, samples: number): number {
	const { style, maximum, minimum, warmupInit, warmupSamples, decaySamples } = schedule;
	if (warmupSamples > 0 && samples <= warmupSamples) {
		return warmupInit + ((maximum - warmupInit) * samples) / warmupSamples;
	}
	if (style === "constant") return maximum;
	if (samples > decaySamples) return minimum;
	if (style === "inverse-square-root") {
		return Math.max(minimum, (maximum * Math.sqrt(Math.max(warmupSamples, 1))) / Math.sqrt(Math.max(samples, 1)));
	}
	return minimum + decayFactor(schedule, style, samples) * (maximum - minimum);
}

/** Weight decay after `samples` samples, before a parameter's multiplier. */
export function weightDecayAt(schedule: WeightDecaySchedule, samples: number): number {
	const { style, start, end, rampSamples } = schedule;
	if (style === "constant" || samples > rampSamples) return end;
	const progress = samples / rampSamples;
	const factor = style === "linear" ? progress : (Math.cos(Math.PI * (1 - progress)) + 1) / 2;
	return start + factor * (end - start);
}

export interface Schedules {
	readonly learningRate: LearningRateSchedule;
	readonly weightDecay: WeightDecaySchedule;
	/** Steps of the whole training. */
	readonly trainIterations: number;
}

/** The schedules of a configuration, in samples even if the configuration counts steps. */
export function schedulesOf(configuration: TrainingConfiguration): Schedules {
	const c = configuration;
	const batch = c.globalBatchSize;
	const inSamples = (iterations: number | null) => (iterations === null ? null : iterations * batch);
	const trainSamples = inSamples(c.trainIters) ?? c.trainSamples!;
	const decaySamples = inSamples(c.lrDecayIters) ?? c.lrDecaySamples ?? trainSamples;
	const warmupSamples =
		c.lrWarmupFraction !== null
			? c.lrWarmupFraction * decaySamples
			: c.lrWarmupIters > 0
				? c.lrWarmupIters * batch
				: c.lrWarmupSamples;
	return {
		learningRate: {
			style: c.lrDecayStyle,
			maximum: c.lr,
			minimum: c.minLr,
			warmupInit: c.lrWarmupInit,
			warmupSamples,
			decaySamples,
			annealStyle: c.lrWsdDecayStyle,
			annealSamples: inSamples(c.lrWsdDecayIters) ?? c.lrWsdDecaySamples ?? 0,
		},
		weightDecay: {
			style: c.weightDecayIncrStyle,
			start: c.startWeightDecay ?? c.weightDecay,
			end: c.endWeightDecay ?? c.weightDecay,
			rampSamples: trainSamples,
		},
		trainIterations: c.trainIters ?? Math.floor(c.trainSamples! / batch),
	};
}
