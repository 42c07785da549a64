/**
 * A checkpoint's record of the Hugging Face folders that a training began from, so that converting it back restores
 * names, config.json, tokenizer and preprocessor: through any number of resumes.
 */
import {
	type CheckpointDescription,
	isKeptObject,
	type Manifest,
	objectsOf,
	spellingObject,
} from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { keptOfFolders, openFolders } from "./hugging-face.ts";
import type { StoredTraining } from "./megatron-checkpoint.ts";

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
export function provenanceIn(checkpoint: StoredTraining): Provenance {
	const { source, objects } = checkpoint.manifest;
	const kept = Object.entries(objects).filter(([name]) => isKeptObject(name));
	return {
		source,
		objects: Object.fromEntries(
			kept.map(([name, { encoding }]) => [name, { encoding, bytes: checkpoint.readObject(name) }]),
		),
	};
}
