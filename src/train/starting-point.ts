/** Where a run starts: a checkpoint's state on this rank, or nothing (runtime.md §10.3). */
import { detectFormat } from "../checkpoint/conversion/source.ts";
import type { NativeCheckpoint } from "../checkpoint/native/reader.ts";
import { hasCheckpoint, openChecked } from "../checkpoint/training/choose.ts";
import { dataObject, readRecord, type TrainingRecord } from "../checkpoint/training/record.ts";
import { restoreTensors } from "../checkpoint/training/restore.ts";
import { requireTensors } from "../checkpoint/training/strict.ts";
import type { TrainingTensors } from "../checkpoint/training/tensors.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { UserError } from "../native/errors.ts";
import type { LearningRateSchedule, Schedules, WeightDecaySchedule } from "../optim/schedules.ts";
import type { Group } from "../parallel/group.ts";
import { atTheStart, type Progress } from "./listeners.ts";
import { type Provenance, provenanceIn } from "./provenance.ts";

export interface StartingPoint {
	readonly progress: Progress;
	readonly optimizerSteps: number;
	/** Those of the checkpoint under --use-checkpoint-opt-param-scheduler, else those of the configuration. */
	readonly schedules: Schedules;
	/** States of the data by rank of the run that saved them; null: the data begin anew. */
	readonly data: readonly unknown[] | null;
	readonly provenance: Provenance;
}

interface Source {
	readonly path: string;
	readonly iteration: number | null;
	/** Weights alone, step 0. */
	readonly finetune: boolean;
}

/** Who hear what the user should know, and what is not as it should be. */
interface Hearers {
	readonly say: (sentence: string) => void;
	readonly warn: (sentence: string) => void;
}

/** What the configuration says to start from; null: nothing. */
function sourceOf(c: TrainingConfiguration, warn: Hearers["warn"]): Source | null {
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
	const format = detectFormat(c.load);
	if (format !== null) {
		throw new UserError(
			`${c.load} (load) is a ${format} checkpoint; \`mimo convert-ckpt --to native ${c.load} TARGET\` makes one to resume from.`,
		);
	}
	if (c.exitOnMissingCheckpoint) throw new UserError(`${c.load} (load) holds no native checkpoint.`);
	warn(`${c.load} (load) holds no checkpoint yet: starting from the beginning.`);
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
	{ say, warn }: Hearers,
): StartingPoint | null {
	const source = sourceOf(c, warn);
	if (source === null) return null;
	using checkpoint = openChecked({ ...source, allowFallback: c.allowFallback }, world, warn);
	requireSameModel(c, checkpoint);
	const optimizer = !source.finetune && !c.noLoadOptim;
	const record = source.finetune ? null : readRecord(checkpoint.manifest, checkpoint.path);
	if (record && optimizer) requireOptimizer(record, checkpoint.path);
	if (record && !c.noLoadRng) requireSeed(record, c, checkpoint.path);
	requireTensors(tensors, checkpoint, optimizer, world);
	const { differing } = restoreTensors(tensors, checkpoint, optimizer);
	if (record !== null && record.participation !== c.encoderGradParticipation) {
		warn(
			`${checkpoint.path} was trained with encoder-grad-participation ${record.participation}, this run has ${c.encoderGradParticipation}.`,
		);
	}
	if (differing.length > 0) {
		warn(
			`${checkpoint.path}: ${differing.length} weights are not their fp32 masters rounded, such as ${differing[0]}; the masters count.`,
		);
	}
	const provenance = provenanceIn(checkpoint);
	if (record === null) {
		say(`Loaded the weights of ${checkpoint.path}.`);
		return { progress: atTheStart, optimizerSteps: 0, schedules, data: null, provenance };
	}
	const progress = progressOf(c, record, optimizer, checkpoint.path);
	say(`Loaded ${checkpoint.path}: going on after step ${progress.iteration}.`);
	return {
		progress,
		optimizerSteps: optimizer ? record.training.optimizerSteps : 0,
		schedules: record.schedules && optimizer ? agreedSchedules(c, schedules, record, checkpoint.path) : schedules,
		data: c.overrideCkptIteration === null ? dataStates(checkpoint) : null,
		provenance,
	};
}

function dataStates(checkpoint: NativeCheckpoint): readonly unknown[] | null {
	if (!(dataObject in checkpoint.manifest.objects)) return null;
	return JSON.parse(new TextDecoder().decode(checkpoint.readObject(dataObject)));
}

function progressOf(
	c: TrainingConfiguration,
	{ training }: TrainingRecord,
	optimizer: boolean,
	path: string,
): Progress {
	const { iteration, consumedSamples, scheduledSamples, consumedValidSamples, globalBatchSize } = training;
	if (globalBatchSize !== c.globalBatchSize && c.overrideCkptIteration === null) {
		throw new UserError(
			`${path} was trained with global-batch-size ${globalBatchSize}, this run has ${c.globalBatchSize}: which samples come next is counted in steps; --override-ckpt-iteration N goes on after step N of this run's.`,
		);
	}
	const override = c.overrideCkptIteration;
	return {
		iteration: override ?? iteration,
		consumedSamples: override === null ? consumedSamples : override * c.globalBatchSize,
		scheduledSamples: optimizer ? scheduledSamples : 0,
		consumedValidSamples,
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
	// Megatron's checkpoints do not say everything.
	const stored: Schedules = {
		...own,
		learningRate: { ...own.learningRate, ...(schedules!.learningRate as Partial<LearningRateSchedule>) },
		weightDecay: { ...own.weightDecay, ...(schedules!.weightDecay as Partial<WeightDecaySchedule>) },
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
