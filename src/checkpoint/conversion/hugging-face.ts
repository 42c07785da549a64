/** Hugging Face folders as source and target of conversions: NemotronH, a RADIO tower, or a vision-language model. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import { type Key, propertyOf } from "../../config/schema.ts";
import type { Durability } from "../files.ts";
import { companionsOf } from "../hf/companions.ts";
import type { Spelling } from "../hf/families/family.ts";
import type { SpellingName } from "../hf/families/nemotron-h-names.ts";
import { HuggingFaceFolder, indexFile, readConfig, singleFile } from "../hf/folder.ts";
import { folderTexts, readImageProcessor } from "../hf/image-processor.ts";
import {
	type FolderSpelling,
	type KeptFolder,
	type KeptObject,
	keepFolder,
	keptIn,
	objectsOf,
} from "../hf/kept-folder.ts";
import { describeParts, type FolderParts, openParts } from "../hf/parts.ts";
import { isLeftOut } from "../hf/unused-tensors.ts";
import { type PlannedFolder, planFolder } from "../hf/written-folder.ts";
import { joinStores, selectTensors, type TensorStore } from "../store.ts";
import type { JsonObject, SourceCheckpoint, SourceOptions } from "./source.ts";

export function openHuggingFaceSource(path: string, options: SourceOptions): SourceCheckpoint {
	const parts = openParts(path, options);
	try {
		const kept = keepFolder(parts, { beside: true });
		return {
			format: "hf",
			path,
			notices: parts.notices,
			warnings: parts.warnings,
			weights: parts.weights,
			stored: parts.stored,
			configuration: parts.language?.configuration ?? null,
			model: { ...describeParts(parts), ...imagesOf(parts) } as JsonObject,
			iteration: null,
			common: {},
			spelling: spellingObject(kept.spelling),
			objects: objectsOf(kept),
			[Symbol.dispose]: () => parts[Symbol.dispose](),
		};
	} catch (error) {
		parts[Symbol.dispose]();
		throw error;
	}
}

/** The image settings of a folder with a tower, by their names in a configuration. */
function imagesOf(parts: FolderParts): JsonObject {
	if (parts.tower === null || parts.language === null) return {};
	const { keys } = readImageProcessor(folderTexts(parts));
	return Object.fromEntries(
		Object.entries(keys).map(([key, said]) => [propertyOf(key as Key), said!.value]),
	) as JsonObject;
}

function withoutImages({ dynamicResolution: _, useTiling: __, ...rest }: JsonObject): JsonObject {
	return rest;
}

/** A folder's spelling of names as a native checkpoint's `source` records it. */
export function spellingObject({ language, tower, projector }: FolderSpelling): JsonObject {
	const vision = tower === null && projector === null ? {} : { huggingFaceVision: { tower, projector } };
	return { huggingFace: language, ...vision } as unknown as JsonObject;
}

/** Parts of a folder that a native checkpoint's `source` and objects keep; null: it came from none. */
export function keptInSource(
	{ source, objects }: { readonly source: JsonObject; readonly objects: Readonly<Record<string, KeptObject>> },
	path: string,
): KeptFolder | null {
	return keptIn(new Map(Object.entries(objects)), spellingIn(source), path);
}

/** The spelling that a native checkpoint's `source` records. */
export function spellingIn(spelling: JsonObject): FolderSpelling {
	const vision = (spelling.huggingFaceVision ?? {}) as Partial<FolderSpelling>;
	const language = (spelling.huggingFace ?? null) as unknown as Spelling | null;
	return { language, tower: vision.tower ?? null, projector: vision.projector ?? null };
}

export interface HuggingFaceTargetOptions extends Durability {
	/** null: as the source was spelled, published otherwise. */
	readonly names: SpellingName | null;
	readonly visionHeads: number | null;
	/** A folder whose config.json, tokenizer, code and tensors without a place are copied. */
	readonly reference: string | null;
	readonly shardBytes: number;
}

/** Plans a folder for a source's model tensors; optimizer state has no place in it. */
export function huggingFaceTarget(
	source: SourceCheckpoint,
	weights: TensorStore,
	path: string,
	options: HuggingFaceTargetOptions,
): PlannedFolder {
	const spelling = spellingIn(source.spelling);
	const kept =
		options.reference === null
			? keptIn(source.objects, spelling, source.path)
			: referenceFolder(options.reference, spelling);
	const model = {
		path: source.path,
		weights: selectTensors(weights, (name) => !name.startsWith("optimizer.")),
		language: source.configuration,
		// A reference's processor is copied, whatever images the model was trained on.
		described: options.reference === null ? source.model : withoutImages(source.model),
		kept,
		companions: kept?.companions ?? new Map(),
	};
	return planFolder(model, path, options);
}

/** Kept parts of a folder of --hf-reference; it may hold no weights at all. */
function referenceFolder(path: string, spelling: FolderSpelling): KeptFolder {
	const configText = readConfig(path);
	const filled = [singleFile, indexFile].some((name) => existsSync(join(path, name)));
	const leftOut = filled ? selectTensors(HuggingFaceFolder.open(path), isLeftOut) : joinStores(path, []);
	return { configText, spelling, leftOut, companions: companionsOf(path) };
}
