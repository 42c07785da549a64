/**
 * Refuses a run's checkpoints and Hugging Face folders before anything else is done: they are opened and compared with
 * the configuration, and no weights are read.
 */
import { join } from "node:path";
import { configurationToHuggingFace } from "../../checkpoint/hf/configuration.ts";
import { requireWritable } from "../../checkpoint/hf/ownership.ts";
import { NativeCheckpoint } from "../../checkpoint/native/reader.ts";
import { iterationName } from "../../checkpoint/native/writer.ts";
import { requireOwnSteps, type Start } from "../../checkpoint/training/own-checkpoints.ts";
import { dataLanes } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { requireFittingStates } from "../../data/routing/source.ts";
import { UserError } from "../../native/errors.ts";
import { languageKeys, openFolders } from "./hugging-face.ts";
import { isMegatron, openMegatron, requireOtherFolder } from "./megatron-checkpoint.ts";
import { openAdapters, requirePeftNames } from "./peft.ts";
import { dataStates, requireAgreement, startOf } from "./starting-point.ts";

/** Throws a UserError for the first thing that the run could not start from, or would have to write over at its end. */
export function requireStart(c: TrainingConfiguration): void {
	const start = startOf(c);
	const lineage = start === null ? null : lineageOf(c, start);
	requireOtherFolder(c.save);
	if (c.save !== null && !c.saveOver) requireOwnSteps(c.save, start);
	using _pretrained = openFolders(c);
	using _adapters = openAdapters(c);
	requirePeftNames(c);
	if (c.savePeft !== null) requireWritable(c.savePeft, lineage, "save-peft");
	if (c.saveHf === null) return;
	requireWritable(c.saveHf, lineage);
	// A model that came from such a folder goes back into one.
	if (c.loadHf === null) configurationToHuggingFace(languageKeys(c), "float32", `--save-hf ${c.saveHf}`);
}

/** Name of the training that a checkpoint is of, once it is known to be of this run's; null: a new one, or unknown. */
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
		// Damage is for the ranks, which read everything and know older checkpoints.
		if (error instanceof UserError) return null;
		throw error;
	}
	using _ = checkpoint;
	const record = requireAgreement(c, start, checkpoint);
	if (record !== null) requireFittingData(c, checkpoint);
	return record?.lineage ?? null;
}

/** Energon data go on exactly, or not at all, with other lanes and workers. */
function requireFittingData(c: TrainingConfiguration, checkpoint: NativeCheckpoint): void {
	if (c.datasetProvider !== "energon" || c.overrideCkptIteration !== null) return;
	let states: readonly unknown[] | null;
	try {
		states = dataStates(checkpoint);
	} catch (error) {
		// Damage, as above.
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
