/** The start of a run: a checkpoint's state on this rank, or nothing (docs/spec/runtime.md §10.3). */
import { existsSync, statSync } from "node:fs";
import {
	bringChosen,
	type CheckpointDescription,
	canonicalCheckpoint,
	dataObject,
	describedModel,
	detectFormat,
	isCheckpoint,
	isKeptObject,
	localFolder,
	type Manifest,
	objectsOf,
	openChecked,
	readRecord,
	requireTensors,
	restoreTensors,
	type Start,
	spellingObject,
	type TrainingRecord,
	type TrainingTensors,
} from "../../checkpoint/index.ts";
import { hasAdapters, hasRouter, requireSameModel } from "../../config/same-model.ts";
import type { Key, TrainingConfiguration } from "../../config/schema.ts";
import {
	type LearningRateSchedule,
	type Schedules,
	schedulesOf,
	type WeightDecaySchedule,
} from "../../optim/schedules.ts";
import type { Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { atTheStart, type Progress } from "../listeners.ts";
import { keptOfFolders, openFolders } from "./hugging-face.ts";
import { isMegatron, openMegatron, type StoredTraining } from "./megatron-checkpoint.ts";
import { shareOfHost, storesOf } from "./object-stores.ts";

export interface StartingPoint {
	readonly progress: Progress;
	readonly optimizerSteps: number;
	/** The checkpoint's schedules under --use-checkpoint-opt-param-scheduler, else the configuration's. */
	readonly schedules: Schedules;
	/** States of the data by rank of the run that saved them; null: the data begin anew. */
	readonly data: readonly unknown[] | null;
	readonly provenance: Provenance;
	/** Name of the run that began the training; null: a new one, or an old checkpoint. */
	readonly lineage: string | null;
}

/** Functions that print messages and warnings for the user. */
interface Printers {
	readonly say: (sentence: string) => void;
	readonly warn: (sentence: string) => void;
}

/** The checkpoint that the configuration says to start from; null: none. */
export function startOf(c: TrainingConfiguration, warn: Printers["warn"] = () => {}): Start | null {
	const load = c.load === null ? null : localFolder(c.load, c.stagingDir);
	if (load !== null && holdsCheckpoint(load)) {
		return { path: load, iteration: c.ckptStep, finetune: c.finetune };
	}
	if (c.pretrainedCheckpoint !== null) {
		const weights = localFolder(c.pretrainedCheckpoint, c.stagingDir);
		if (!holdsCheckpoint(weights)) {
			throw new UserError(
				`${c.pretrainedCheckpoint} (pretrained-checkpoint) holds no native or torch_dist checkpoint.`,
			);
		}
		return { path: weights, iteration: null, finetune: true };
	}
	if (load === null) return null;
	if (existsSync(load) && !statSync(load).isDirectory()) {
		throw new UserError(`${c.load} (load) is no folder of checkpoints.`);
	}
	const format = detectFormat(load);
	if (format !== null) {
		throw new UserError(
			`${c.load} (load) is a ${format} checkpoint; \`mimo convert-ckpt --to native ${c.load} TARGET\` makes one to resume from.`,
		);
	}
	if (c.exitOnMissingCheckpoint) throw new UserError(`${c.load} (load) holds no native or torch_dist checkpoint.`);
	warn(`${c.load} (load) holds no checkpoint yet: starting from the beginning.`);
	return null;
}

function holdsCheckpoint(path: string): boolean {
	return isCheckpoint(path) || isMegatron(path);
}

/**
 * Restores this rank from the checkpoint that the configuration names; null where it names none. Every rank of `world`
 * calls this together, weights having their initial values.
 */
export async function restoreTraining(
	c: TrainingConfiguration,
	tensors: TrainingTensors,
	schedules: Schedules,
	world: Group,
	{ say, warn }: Printers,
): Promise<StartingPoint | null> {
	const source = startOf(c, warn);
	if (source === null) return null;
	const optimizer = restoresOptimizer(c, source);
	using checkpoint = await openStart(c, source, optimizer, world, { say, warn });
	const record = requireAgreement(c, source, checkpoint);
	// A base without adapters, or without a router, leaves theirs at their initial values.
	const there = describedModel(checkpoint.manifest);
	const wanted = tensors.of({ adapters: hasAdapters(there), router: hasRouter(there) });
	if (c.flextron && !hasRouter(there)) warn(`${checkpoint.path} has no router: this run begins with a drawn one.`);
	requireTensors(wanted, checkpoint, optimizer, world);
	const { differing } = restoreTensors(wanted, checkpoint, { optimizer });
	if (record !== null && record.participation !== c.encoderGradParticipation) {
		warn(
			`${checkpoint.path} was trained with encoder-grad-participation ${record.participation}, this run has ${c.encoderGradParticipation}.`,
		);
	}
	if (record !== null && optimizer)
		for (const change of precisionChanges(c, record.precision)) {
			warn(`${checkpoint.path} was trained with ${change}.`);
		}
	if (differing.length > 0) {
		warn(
			`${checkpoint.path}: ${differing.length} weights are not their fp32 masters rounded, such as ${differing[0]}; the masters count.`,
		);
	}
	const provenance = provenanceIn(checkpoint);
	if (record === null) {
		say(`Loaded the weights of ${checkpoint.path}.`);
		return { progress: atTheStart, optimizerSteps: 0, schedules, data: null, provenance, lineage: null };
	}
	const progress = progressOf(c, record, optimizer);
	say(`Loaded ${checkpoint.path}: going on after step ${progress.iteration}.`);
	const agreed =
		record.schedules && optimizer && !c.noLoadScheduler
			? agreedSchedules(c, schedules, record.schedules, checkpoint.path)
			: schedules;
	const { decaySamples, minimum } = agreed.learningRate;
	if (decaySamples < schedules.learningRate.decaySamples && agreed.learningRate.style !== "constant") {
		warn(
			`The learning rate follows the schedule that ${checkpoint.path} began with: it is ${minimum} after step ${Math.ceil(decaySamples / c.globalBatchSize)} (--override-opt-param-scheduler stretches it).`,
		);
	}
	return {
		progress,
		optimizerSteps: optimizer ? record.training.optimizerSteps : 0,
		schedules: agreed,
		data: c.overrideCkptIteration === null ? dataStates(checkpoint) : null,
		provenance,
		lineage: record.lineage,
	};
}

async function openStart(
	c: TrainingConfiguration,
	source: Start,
	optimizer: boolean,
	world: Group,
	{ say, warn }: Printers,
): Promise<StoredTraining> {
	if (!isMegatron(source.path)) {
		const choice = { ...source, allowFallback: c.allowFallback };
		const store = storesOf(c).find(({ folder }) => folder === source.path);
		if (store !== undefined) await bringChosen(store, choice, world, shareOfHost());
		return canonicalCheckpoint(openChecked(choice, world, warn));
	}
	const checkpoint = openMegatron(c, source, optimizer);
	for (const sentence of checkpoint.notices) say(sentence);
	for (const sentence of checkpoint.warnings) warn(sentence);
	await checkpoint.prepare();
	return checkpoint;
}

/** States of the data by rank of the run that saved them; null: the checkpoint has none. */
export function dataStates(checkpoint: Pick<StoredTraining, "manifest" | "readObject">): readonly unknown[] | null {
	if (!(dataObject in checkpoint.manifest.objects)) return null;
	return JSON.parse(new TextDecoder().decode(checkpoint.readObject(dataObject)));
}

function restoresOptimizer(c: TrainingConfiguration, { finetune }: Start): boolean {
	return !finetune && !c.noLoadOptim;
}

/**
 * Throws a UserError unless this run may start from the checkpoint as its index describes it: the same model and, going on
 * with the training, its optimizer, seed, batch size and schedules. Returns its record; null: weights alone are loaded.
 */
export function requireAgreement(
	c: TrainingConfiguration,
	source: Start,
	{ manifest, path }: Pick<StoredTraining, "manifest" | "path">,
): TrainingRecord | null {
	requireSameModel(path, describedModel(manifest), { ...c });
	if (source.finetune) return null;
	if (hasAdapters({ ...c }) && !hasAdapters(describedModel(manifest))) {
		throw new UserError(
			`${path} has no adapters to go on with; --finetune (or --pretrained-checkpoint) takes its weights as the base of new ones.`,
		);
	}
	if (c.flextron && !hasRouter(describedModel(manifest))) {
		throw new UserError(
			`${path} has no router to go on with; --finetune (or --pretrained-checkpoint) takes its weights as the parent of a new one.`,
		);
	}
	const record = readRecord(manifest, path);
	const optimizer = restoresOptimizer(c, source);
	if (optimizer) requireOptimizer(record, c, path);
	if (!c.noLoadRng) requireSeed(record, c, path);
	requireBatchSize(record, c, path);
	if (record.schedules && optimizer && !c.noLoadScheduler) agreedSchedules(c, schedulesOf(c), record.schedules, path);
	return record;
}

function requireBatchSize({ training: { globalBatchSize } }: TrainingRecord, c: TrainingConfiguration, path: string) {
	if (globalBatchSize !== c.globalBatchSize && c.overrideCkptIteration === null) {
		throw new UserError(
			`${path} was trained with global-batch-size ${globalBatchSize}, this run has ${c.globalBatchSize}: which samples come next is counted in steps; --override-ckpt-iteration N goes on after step N of this run's.`,
		);
	}
}

function progressOf(c: TrainingConfiguration, { training }: TrainingRecord, optimizer: boolean): Progress {
	const { iteration, consumedSamples, scheduledSamples, consumedValidSamples, kept = {} } = training;
	const override = c.overrideCkptIteration;
	return {
		iteration: override ?? iteration,
		consumedSamples: override === null ? consumedSamples : override * c.globalBatchSize,
		scheduledSamples: optimizer && !c.noLoadScheduler ? scheduledSamples : 0,
		consumedValidSamples,
		kept,
	};
}

function requireOptimizer({ schedules, updates }: TrainingRecord, c: TrainingConfiguration, path: string): void {
	if (schedules === null) {
		throw new UserError(`${path} was saved without its optimizer; --no-load-optim goes on with a new one.`);
	}
	if (updates === c.optimizer) return;
	throw new UserError(
		`${path} was trained with optimizer ${updates}, this run has ${c.optimizer}; --no-load-optim goes on with a new one.`,
	);
}

function requireSeed({ rng }: TrainingRecord, c: TrainingConfiguration, path: string): void {
	if (rng === null) throw new UserError(`${path} was saved without its seed; --no-load-rng takes that of this run.`);
	if (rng.seed === c.seed) return;
	throw new UserError(
		`${path} was trained with seed ${rng.seed}, this run has ${c.seed}; --no-load-rng goes on with other random numbers.`,
	);
}

// The schedules of a resumed run: the checkpoint's and this run's must be equal unless a flag chooses one (docs/spec/runtime.md
// §5). A length that no flag gives follows from the training's length: the checkpoint's stays, so that a training may be made
// longer.

/** Returns the schedules to follow. Throws a UserError that names every differing flag. */
function agreedSchedules(
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

// A checkpoint's record of the Hugging Face folders that a training began from, so that converting it back restores
// names, config.json, tokenizer and preprocessor: through any number of resumes.

export interface Provenance {
	readonly source: Manifest["source"];
	readonly objects: NonNullable<CheckpointDescription["objects"]>;
}

const none: Provenance = { source: {}, objects: {} };

/** The provenance of a run that starts from Hugging Face folders. */
export function provenanceOfFolders(c: TrainingConfiguration): Provenance {
	using pretrained = openFolders(c);
	const kept = pretrained && keptOfFolders(c, pretrained, true);
	if (kept === null) return none;
	return { source: spellingObject(kept.spelling), objects: Object.fromEntries(objectsOf(kept)) };
}

/** Provenance in the checkpoint that a run starts from. */
function provenanceIn(checkpoint: StoredTraining): Provenance {
	const { source, objects } = checkpoint.manifest;
	const kept = Object.entries(objects).filter(([name]) => isKeptObject(name));
	return {
		source,
		objects: Object.fromEntries(
			kept.map(([name, { encoding }]) => [name, { encoding, bytes: checkpoint.readObject(name) }]),
		),
	};
}

// In which precision a training keeps its moments and sums its gradients, as its checkpoints record it.

export function precisionOf(c: TrainingConfiguration): TrainingRecord["precision"] {
	return { expAvg: c.expAvgDtype, expAvgSq: c.expAvgSqDtype, gradientSums: c.gradReduceInBf16 ? "bf16" : "fp32" };
}

/** Differences of precision between a run and the training whose optimizer it takes over, and their effect: parts of sentences. */
function precisionChanges(c: TrainingConfiguration, before: TrainingRecord["precision"]): string[] {
	const now = precisionOf(c);
	const moment = (key: string, was: string, is: string) =>
		`${key} ${was}, this run has ${is}: what it holds is ${is === "bf16" ? "rounded to the nearest" : "widened"}`;
	return [
		...(before.expAvg === now.expAvg ? [] : [moment("exp-avg-dtype", before.expAvg, now.expAvg)]),
		...(before.expAvgSq === now.expAvgSq ? [] : [moment("exp-avg-sq-dtype", before.expAvgSq, now.expAvgSq)]),
		...(before.gradientSums === now.gradientSums
			? []
			: [
					`gradients summed in ${before.gradientSums}, this run sums them in ${now.gradientSums} (grad-reduce-in-bf16)`,
				]),
	];
}
