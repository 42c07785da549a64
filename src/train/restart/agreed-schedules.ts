/**
 * The schedules of a resumed run: the checkpoint's and this run's must be equal unless a flag chooses one (docs/spec/runtime.md
 * §5). A length that no flag gives follows from the training's length: the checkpoint's stays, so that a training may be made
 * longer.
 */
import type { TrainingRecord } from "../../checkpoint/index.ts";
import type { Key, TrainingConfiguration } from "../../config/schema.ts";
import type { LearningRateSchedule, Schedules, WeightDecaySchedule } from "../../optim/schedules.ts";
import { UserError } from "../../system/errors.ts";

/** Returns the schedules to follow. Throws a UserError that names every differing flag. */
export function agreedSchedules(
	c: TrainingConfiguration,
	own: Schedules,
	schedules: NonNullable<TrainingRecord["schedules"]>,
	path: string,
): Schedules {
	// Megatron's checkpoints lack some fields.
	const stored: Schedules = {
		...own,
		learningRate: { ...own.learningRate, ...(schedules.learningRate as Partial<LearningRateSchedule>) },
		weightDecay: { ...own.weightDecay, ...(schedules.weightDecay as Partial<WeightDecaySchedule>) },
	};
	if (c.useCheckpointOptParamScheduler) return stored;
	if (c.overrideOptParamScheduler) return own;
	const [here, there] = [flagsOf(own, c), flagsOf(stored, c)];
	const keys = [...new Set([...here.keys(), ...there.keys()])].filter((key) => here.get(key) !== there.get(key));
	if (keys.length === 0) return own;
	if (keys.every((key) => followsLength(key, c))) return stored;
	const list = keys.map((key) => `--${key} is ${there.get(key) ?? "unset"} there and ${here.get(key) ?? "unset"} here`);
	throw new UserError(
		`${path} has another schedule: ${list.join("; ")}; --override-opt-param-scheduler keeps that of this run, --use-checkpoint-opt-param-scheduler takes that of the checkpoint.`,
	);
}

/** Whether a schedule's value follows from the training's length. */
function followsLength(key: Key, c: TrainingConfiguration): boolean {
	switch (key) {
		case "lr-decay-iters":
		case "lr-decay-samples":
			return c.lrDecayIters === null && c.lrDecaySamples === null;
		case "lr-warmup-iters":
		case "lr-warmup-samples":
			return c.lrWarmupFraction !== null;
		default:
			return key === "train-iters" || key === "train-samples";
	}
}

/** The effective values of the schedules by flag, in steps if the run counts steps. */
function flagsOf({ learningRate, weightDecay }: Schedules, c: TrainingConfiguration): Map<Key, string | number> {
	const inSteps = c.trainIters !== null;
	const flags = new Map<Key, string | number>();
	const length = (samples: number) => (inSteps ? samples / c.globalBatchSize : samples);
	flags.set("lr-decay-style", learningRate.style);
	flags.set("lr", learningRate.maximum);
	flags.set("min-lr", learningRate.minimum);
	flags.set("lr-warmup-init", learningRate.warmupInit);
	flags.set(inSteps ? "lr-warmup-iters" : "lr-warmup-samples", length(learningRate.warmupSamples));
	if (learningRate.style !== "constant") {
		flags.set(inSteps ? "lr-decay-iters" : "lr-decay-samples", length(learningRate.decaySamples));
	}
	if (learningRate.style === "WSD") {
		flags.set("lr-wsd-decay-style", learningRate.annealStyle);
		flags.set(inSteps ? "lr-wsd-decay-iters" : "lr-wsd-decay-samples", length(learningRate.annealSamples));
	}
	flags.set("weight-decay-incr-style", weightDecay.style);
	if (weightDecay.style === "constant") flags.set("weight-decay", weightDecay.end);
	else {
		flags.set("start-weight-decay", weightDecay.start);
		flags.set("end-weight-decay", weightDecay.end);
		flags.set(inSteps ? "train-iters" : "train-samples", length(weightDecay.rampSamples));
	}
	return flags;
}
