/** Where a run starts: a checkpoint's state on this rank, or nothing (runtime.md §10.3). */
import { detectFormat } from "../checkpoint/conversion/source.ts";
import type { NativeCheckpoint } from "../checkpoint/native/reader.ts";
import { hasCheckpoint, openChecked } from "../checkpoint/training/choose.ts";
import { describedModel } from "../checkpoint/training/megatron-record.ts";
import { dataObject, readRecord, type TrainingRecord } from "../checkpoint/training/record.ts";
import { restoreTensors } from "../checkpoint/training/restore.ts";
import { requireTensors } from "../checkpoint/training/strict.ts";
import type { TrainingTensors } from "../checkpoint/training/tensors.ts";
import { requireSameModel } from "../config/same-model.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { UserError } from "../native/errors.ts";
import type { Schedules } from "../optim/schedules.ts";
import type { Group } from "../parallel/group.ts";
import { agreedSchedules } from "./agreed-schedules.ts";
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
	requireSameModel(checkpoint.path, describedModel(checkpoint.manifest), { ...c });
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
		schedules:
			record.schedules && optimizer ? agreedSchedules(c, schedules, record.schedules, checkpoint.path) : schedules,
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
