/**
 * What a checkpoint keeps of the Hugging Face folder that a training began from, so that converting it back restores names
 * and config.json: through any number of resumes.
 */
import { configObject } from "../../checkpoint/conversion/hugging-face.ts";
import { HuggingFaceFolder } from "../../checkpoint/hf/folder.ts";
import { detectSpelling } from "../../checkpoint/hf/language-names.ts";
import type { Json, Manifest } from "../../checkpoint/native/manifest.ts";
import type { NativeCheckpoint } from "../../checkpoint/native/reader.ts";
import type { CheckpointDescription } from "../../checkpoint/native/writer.ts";
import { hasEncoder } from "../../config/derive.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";

export interface Provenance {
	readonly source: Manifest["source"];
	readonly objects: NonNullable<CheckpointDescription["objects"]>;
}

const none: Provenance = { source: {}, objects: {} };

/** Of --load-hf. With an encoder the folder describes a part of the model only, so nothing is kept. */
export function provenanceOfFolder(c: TrainingConfiguration): Provenance {
	if (c.loadHf === null || hasEncoder(c)) return none;
	using folder = HuggingFaceFolder.open(c.loadHf);
	return {
		source: { huggingFace: detectSpelling(folder.tensors.keys()) as unknown as Json },
		objects: { [configObject]: { encoding: "json", bytes: new TextEncoder().encode(folder.configText) } },
	};
}

/** Of a checkpoint that a run starts from. */
export function provenanceIn(checkpoint: NativeCheckpoint): Provenance {
	const { source, objects } = checkpoint.manifest;
	const config = objects[configObject];
	return {
		source,
		objects: config
			? { [configObject]: { encoding: config.encoding, bytes: checkpoint.readObject(configObject) } }
			: {},
	};
}
