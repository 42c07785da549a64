/** The start of a run: a checkpoint's state on this rank, or nothing (docs/spec/runtime.md §10.3). */
import { existsSync, statSync } from "node:fs";
import {
	canonicalCheckpoint,
	dataObject,
	describedModel,
	detectFormat,
	isCheckpoint,
	openChecked,
	readRecord,
	requireTensors,
	restoreTensors,
	type Start,
	type TrainingRecord,
	type TrainingTensors,
} from "../../checkpoint/index.ts";
import { hasAdapters, hasRouter, requireSameModel } from "../../config/same-model.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { type Schedules, schedulesOf } from "../../optim/schedules.ts";
import type { Group } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import { atTheStart, type Progress } from "../listeners.ts";
import { agreedSchedules } from "./agreed-schedules.ts";
import { isMegatron, openMegatron, type StoredTraining } from "./megatron-checkpoint.ts";
import { precisionChanges } from "./precision.ts";
import { type Provenance, provenanceIn } from "./provenance.ts";

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
	if (c.load !== null && holdsCheckpoint(c.load)) {
		return { path: c.load, iteration: c.ckptStep, finetune: c.finetune };
	}
	if (c.pretrainedCheckpoint !== null) {
		if (!holdsCheckpoint(c.pretrainedCheckpoint)) {
			throw new UserError(
				`${c.pretrainedCheckpoint} (pretrained-checkpoint) holds no native or torch_dist checkpoint.`,
			);
		}
		return { path: c.pretrainedCheckpoint, iteration: null, finetune: true };
	}
	if (c.load === null) return null;
	if (existsSync(c.load) && !statSync(c.load).isDirectory()) {
		throw new UserError(`${c.load} (load) is no folder of checkpoints.`);
	}
	const format = detectFormat(c.load);
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
	const { differing } = restoreTensors(wanted, checkpoint, optimizer);
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
		return canonicalCheckpoint(openChecked({ ...source, allowFallback: c.allowFallback }, world, warn));
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
	if (optimizer) requireOptimizer(record, path);
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
	const { iteration, consumedSamples, scheduledSamples, consumedValidSamples } = training;
	const override = c.overrideCkptIteration;
	return {
		iteration: override ?? iteration,
		consumedSamples: override === null ? consumedSamples : override * c.globalBatchSize,
		scheduledSamples: optimizer && !c.noLoadScheduler ? scheduledSamples : 0,
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
