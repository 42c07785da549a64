/** Where a run starts: a checkpoint's state on this rank, or nothing (runtime.md §10.3). */
import type { NativeCheckpoint } from "../checkpoint/native/reader.ts";
import { hasCheckpoint, openChecked } from "../checkpoint/training/choose.ts";
import { readRecord, type TrainingProgress, type TrainingRecord } from "../checkpoint/training/record.ts";
import { restoreTensors } from "../checkpoint/training/restore.ts";
import { requireTensors } from "../checkpoint/training/strict.ts";
import type { TrainingTensors } from "../checkpoint/training/tensors.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { UserError } from "../native/errors.ts";
import type { LearningRateSchedule, Schedules, WeightDecaySchedule } from "../optim/schedules.ts";
import type { Group } from "../parallel/group.ts";

export interface StartingPoint {
	readonly progress: TrainingProgress;
	/** Those of the checkpoint under --use-checkpoint-opt-param-scheduler, else those of the configuration. */
	readonly schedules: Schedules;
	/** States of the data by lane, as they were saved; empty: there were none, or they do not count. */
	readonly data: ReadonlyMap<string, string>;
}

export const freshStart: TrainingProgress = {
	iteration: 0,
	consumedSamples: 0,
	scheduledSamples: 0,
	skippedSteps: 0,
	optimizerSteps: 0,
};

interface Source {
	readonly path: string;
	readonly iteration: number | null;
	/** Weights alone, step 0. */
	readonly finetune: boolean;
}

/** What the configuration says to start from; null: nothing. */
function sourceOf(c: TrainingConfiguration, say: (sentence: string) => void): Source | null {
	if (c.load !== null && hasCheckpoint(c.load)) {
		return { path: c.load, iteration: c.ckptStep, finetune: c.finetune };
	}
	if (c.pretrainedCheckpoint !== null) {
		if (!hasCheckpoint(c.pretrainedCheckpoint)) {
			throw new UserError(`${c.pretrainedCheckpoint} (pretrained-checkpoint) holds no native checkpoint.`);
		}
		return { path: c.pretrainedCheckpoint, iteration: null, finetune: true };
	}
	if (c.load === null) return null;
	if (c.exitOnMissingCheckpoint) throw new UserError(`${c.load} (load) holds no native checkpoint.`);
	say(`${c.load} (load) holds no checkpoint yet: starting from the beginning.`);
	return null;
}

/**
 * Restores this rank from what the configuration names; null where it names nothing. Every rank of `world` calls this
 * together, weights having their initial values.
 */
export function restoreTraining(
	c: TrainingConfiguration,
	tensors: TrainingTensors,
	schedules: Schedules,
	world: Group,
	say: (sentence: string) => void,
): StartingPoint | null {
	const source = sourceOf(c, say);
	if (source === null) return null;
	using checkpoint = openChecked({ ...source, allowFallback: c.allowFallback }, world, say);
	requireSameModel(c, checkpoint);
	const optimizer = !source.finetune && !c.noLoadOptim;
	const record = source.finetune ? null : readRecord(checkpoint.manifest, checkpoint.path);
	if (record && optimizer) requireOptimizer(record, checkpoint.path);
	if (record && !c.noLoadRng) requireSeed(record, c, checkpoint.path);
	requireTensors(tensors, checkpoint, optimizer, world);
	const { differing } = restoreTensors(tensors, checkpoint, optimizer);
	if (differing.length > 0) {
		say(
			`${checkpoint.path}: ${differing.length} weights are not their fp32 masters rounded, such as ${differing[0]}; the masters count.`,
		);
	}
	if (record === null) {
		say(`Loaded the weights of ${checkpoint.path}.`);
		return { progress: freshStart, schedules, data: new Map() };
	}
	const progress = progressOf(c, record, optimizer);
	say(`Loaded ${checkpoint.path}: going on after step ${progress.iteration}.`);
	return {
		progress,
		schedules: record.schedules && optimizer ? agreedSchedules(c, schedules, record, checkpoint.path) : schedules,
		data: dataStates(checkpoint),
	};
}

function dataStates(checkpoint: NativeCheckpoint): Map<string, string> {
	const names = Object.keys(checkpoint.manifest.objects).filter((name) => name.startsWith("data/"));
	return new Map(
		names.map((name) => [name.slice("data/".length), new TextDecoder().decode(checkpoint.readObject(name))]),
	);
}

function progressOf(c: TrainingConfiguration, { training }: TrainingRecord, optimizer: boolean): TrainingProgress {
	const iteration = c.overrideCkptIteration ?? training.iteration;
	return {
		...training,
		iteration,
		consumedSamples:
			c.overrideCkptIteration === null ? training.consumedSamples : c.overrideCkptIteration * c.globalBatchSize,
		...(optimizer ? {} : { scheduledSamples: 0, optimizerSteps: 0 }),
	};
}

function requireOptimizer({ schedules }: TrainingRecord, path: string): void {
	if (schedules !== null) return;
	throw new UserError(`${path} was saved without its optimizer; --no-load-optim goes on with a new one.`);
}

function requireSeed({ rng }: TrainingRecord, c: TrainingConfiguration, path: string): void {
	if (rng === null) throw new UserError(`${path} was saved without its seed; --no-load-rng takes that of this run.`);
	if (rng.seed === c.seed) return;
	throw new UserError(
		`${path} was trained with seed ${rng.seed}, this run has ${c.seed}; --no-load-rng goes on with other random numbers.`,
	);
}

/** Keys that change what the weights mean though not their shapes. */
const decisive = [
	"modelProvider",
	"hybridLayerPattern",
	"hiddenSize",
	"numAttentionHeads",
	"numQueryGroups",
	"kvChannels",
	"mambaNumHeads",
	"mambaHeadDim",
	"mambaNumGroups",
	"mambaStateDim",
	"numExperts",
	"moeRouterTopk",
	"patchDim",
	"pixelShuffle",
	"visionNumAttentionHeads",
] as const satisfies (keyof TrainingConfiguration)[];

function requireSameModel(c: TrainingConfiguration, { manifest, path }: NativeCheckpoint): void {
	const different = decisive.filter((key) => key in manifest.model && manifest.model[key] !== c[key]);
	if (different.length === 0) return;
	const list = different.map((key) => `${key} is ${manifest.model[key]} there and ${c[key]} here`).join("; ");
	throw new UserError(`${path} holds another model: ${list}.`);
}

/** Fields of the schedules that have an effect, in the order they are compared. */
function effective({ learningRate, weightDecay }: Schedules): Record<string, string | number> {
	const { style, decaySamples, annealStyle, annealSamples, ...rest } = learningRate;
	const decays = style === "constant" ? {} : { decaySamples };
	const anneals = style === "WSD" ? { annealStyle, annealSamples } : {};
	const { rampSamples, ...decay } = weightDecay;
	const ramps = decay.style === "constant" ? {} : { rampSamples };
	const named = (prefix: string, fields: object) =>
		Object.entries(fields).map(([name, value]) => [`${prefix} ${name}`, value]);
	return Object.fromEntries([
		...named("learning rate", { style, ...rest, ...decays, ...anneals }),
		...named("weight decay", { ...decay, ...ramps }),
	]);
}

/** Megatron's rule: equal, or one of the two is chosen by a flag (runtime.md §5). */
function agreedSchedules(c: TrainingConfiguration, own: Schedules, { schedules }: TrainingRecord, path: string) {
	const stored: Schedules = {
		...own,
		learningRate: schedules!.learningRate as unknown as LearningRateSchedule,
		weightDecay: schedules!.weightDecay as unknown as WeightDecaySchedule,
	};
	if (c.useCheckpointOptParamScheduler) return stored;
	if (c.overrideOptParamScheduler) return own;
	const [here, there] = [effective(own), effective(stored)];
	const names = [...new Set([...Object.keys(here), ...Object.keys(there)])].filter(
		(name) => here[name] !== there[name],
	);
	if (names.length === 0) return own;
	const list = names.map((name) => `${name} is ${there[name] ?? "absent"} there and ${here[name] ?? "absent"} here`);
	throw new UserError(
		`${path} has another schedule: ${list.join("; ")}; --override-opt-param-scheduler keeps that of this run, --use-checkpoint-opt-param-scheduler takes that of the checkpoint.`,
	);
}
