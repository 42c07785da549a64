/**
 * Checks the checkpoints and Hugging Face folders of a run before ranks start: opens them and compares them with the
 * configuration, without reading weights.
 */

import { dirname, join, resolve } from "node:path";
import {
	configurationToHuggingFace,
	isStoreUrl,
	iterationName,
	localFolder,
	NativeCheckpoint,
	requireOwnSteps,
	requireWritable,
	roomProblem,
	type Start,
} from "../../checkpoint/index.ts";
import { dataLanes } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { requireFittingStates } from "../../data/routing/source.ts";
import { guestsOf } from "../../guests/index.ts";
import { countParameters } from "../../models/language/counts.ts";
import { UserError } from "../../system/errors.ts";
import { keptOfFolders, languageKeys, openFolders, requireImages, withText } from "./hugging-face.ts";
import { isMegatron, openMegatron, requireOtherFolder } from "./megatron-checkpoint.ts";
import { openAdapters, requirePeftNames } from "./peft.ts";
import { dataStates, requireAgreement, startOf } from "./starting-point.ts";

/** Throws a UserError for the first checkpoint or folder that the run cannot start from, or would overwrite at its end. */
export async function requireStart(c: TrainingConfiguration): Promise<void> {
	// A guest that the run cannot have throws where it is made.
	guestsOf(c, 0);
	const start = startOf(c);
	const lineage = start === null ? null : lineageOf(c, start);
	const save = c.save === null ? null : localFolder(c.save, c.stagingDir);
	requireOtherFolder(save);
	if (save !== null && !c.saveOver) requireOwnSteps(save, start);
	using pretrained = openFolders(c);
	using _adapters = openAdapters(c);
	requirePeftNames(c);
	if (c.savePeft !== null) await requireWritable(c.savePeft, lineage, "save-peft");
	if (c.saveHf === null) return;
	await requireWritable(c.saveHf, lineage, "save-hf");
	// A run that goes on without its folders finds what is kept of them in the checkpoint, which ranks read.
	if (pretrained !== null || start === null) requireImages(c, pretrained && keptOfFolders(c, pretrained, false));
	// A model that was loaded from a Hugging Face folder can always be written as one.
	if (c.loadHf === null) configurationToHuggingFace(languageKeys(c), "float32", `--save-hf ${c.saveHf}`);
	requireRoomForModel(c, c.saveHf);
	// Files that cannot be passed on are refused now, not at the end.
	const kept = pretrained === null ? null : keptOfFolders(c, pretrained, false);
	withText(kept?.companions ?? new Map(), c);
}

/** Throws a UserError where the language model alone would not fit on the disk: the end of a training is too late to say so. */
function requireRoomForModel(c: TrainingConfiguration, target: string): void {
	// Weights that came from elsewhere go back in their own types, of which no float is shorter.
	const valueBytes = c.loadHf === null && c.load === null && c.pretrainedCheckpoint === null ? 4 : 2;
	const place = isStoreUrl(target) ? dirname(localFolder(target, c.stagingDir)) : resolve(target);
	const problem = roomProblem(`--save-hf ${target}: the model`, place, valueBytes * countParameters(c).total);
	if (problem !== null) throw new UserError(problem);
}

/** Lineage of the checkpoint that the run continues, after checking that it fits; null: a new training, or unknown. */
function lineageOf(c: TrainingConfiguration, start: Start): string | null {
	if (isMegatron(start.path)) {
		using checkpoint = openMegatron(c, start, false);
		return requireAgreement(c, start, checkpoint)?.lineage ?? null;
	}
	const path = start.iteration === null ? start.path : join(start.path, iterationName(start.iteration));
	let checkpoint: NativeCheckpoint;
	try {
		checkpoint = NativeCheckpoint.openExactly(path);
	} catch (error) {
		// Damage is left to the ranks, which verify every byte and can fall back to older checkpoints.
		if (error instanceof UserError) return null;
		throw error;
	}
	using _ = checkpoint;
	const record = requireAgreement(c, start, checkpoint);
	if (record !== null) requireFittingData(c, checkpoint);
	return record?.lineage ?? null;
}

/** Throws a UserError if the saved Energon state cannot continue exactly with this run's lanes and workers. */
function requireFittingData(c: TrainingConfiguration, checkpoint: NativeCheckpoint): void {
	if (c.datasetProvider !== "energon" || c.overrideCkptIteration !== null) return;
	let states: readonly unknown[] | null;
	try {
		states = dataStates(checkpoint);
	} catch (error) {
		// Damage is left to the ranks, as in lineageOf.
		if (error instanceof UserError) return;
		throw error;
	}
	if (states === null) return;
	try {
		requireFittingStates(states, dataLanes(c), c.numWorkers);
	} catch (error) {
		throw error instanceof UserError ? new UserError(`${checkpoint.path}: ${error.message}`) : error;
	}
}
