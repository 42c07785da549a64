/** Hugging Face folders as source and target of conversions: NemotronH, a RADIO tower, or a vision-language model. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { type Key, propertyOf } from "../../config/schema.ts";
import { isAdapterName } from "../../models/lora.ts";
import { UserError } from "../../system/errors.ts";
import type { Durability } from "../files.ts";
import { companionsOf } from "../hf/companions.ts";
import type { Spelling } from "../hf/families/family.ts";
import type { SpellingName } from "../hf/families/nemotron-h-names.ts";
import { HuggingFaceFolder, indexFile, readConfig, singleFile } from "../hf/folder.ts";
import { folderTexts, readImageProcessor } from "../hf/image-processor.ts";
import { parsePythonJson } from "../hf/json.ts";
import {
	configObject,
	type FolderSpelling,
	type KeptFolder,
	type KeptObject,
	keepFolder,
	keptIn,
	objectsOf,
} from "../hf/kept-folder.ts";
import { describeParts, type FolderParts, openParts } from "../hf/parts.ts";
import { projectorPrefix } from "../hf/projector-names.ts";
import { isKept, isLeftOut } from "../hf/unused-tensors.ts";
import { behindTap, visionOfLogical } from "../hf/vision-configuration.ts";
import { towerPrefix } from "../hf/vision-names.ts";
import { type PlannedFolder, planFolder } from "../hf/written-folder.ts";
import { MergedStore, scaleOf } from "../lora/adapters.ts";
import { type AdapterSettings, openPeftFolder, type PlannedAdapters, planPeftFolder } from "../lora/peft-folder.ts";
import { type AdaptedModel, moduleSpelling, storedSpelling } from "../lora/peft-names.ts";
import { joinStores, selectTensors, type TensorStore } from "../store.ts";
import type { FormatName, JsonObject, SourceCheckpoint, SourceOptions } from "./source.ts";

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
function spellingIn(spelling: JsonObject): FolderSpelling {
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
	const { configText } = readConfig(path);
	const configPath = join(path, "config.json");
	const behind = behindTap(parsePythonJson(configText, configPath), spelling.tower, configPath);
	const filled = [singleFile, indexFile].some((name) => existsSync(join(path, name)));
	const leftOut = filled
		? selectTensors(
				HuggingFaceFolder.open(path),
				(name) => (isLeftOut(name) && isKept(name, { beside: false })) || behind(name),
			)
		: joinStores(path, []);
	return { configText, spelling, leftOut, companions: companionsOf(path) };
}

// Low-rank adapters in conversions: merged into their weights, kept in native checkpoints, or written for PEFT.

/** A format that a conversion may write. */
export type TargetName = FormatName | "peft";

/**
 * The tensors of a source as a target of format `to` gets them. `given`: a PEFT folder whose adapters are merged into the
 * source's weights; null: none.
 */
export function adaptedWeights(source: SourceCheckpoint, to: TargetName, given: string | null): TensorStore {
	const { weights, path } = source;
	const own = [...weights.tensors.keys()].some(isAdapterName);
	if (given !== null) {
		if (own || to === "peft") {
			throw new UserError(
				own
					? `${path} has adapters already: --adapters ${given} has no place.`
					: `--adapters ${given} is a PEFT folder already.`,
			);
		}
		return mergeGiven(source, given);
	}
	if (to === "peft") {
		if (!own) throw new UserError(`${path} has no adapters.`);
		return selectTensors(weights, (name) => isAdapterName(name) && !name.startsWith("optimizer."));
	}
	if (!own || to === "native") return weights;
	const kept = selectTensors(weights, (name) => !(isAdapterName(name) && name.startsWith("optimizer.")));
	return new MergedStore(kept, settingsOf(source).scale);
}

/** The model of a source that adapters are of; null: it does not say what model it holds. */
export function adaptedModel({ weights, configuration, model, path }: SourceCheckpoint): AdaptedModel | null {
	return configuration && { ...configuration, vision: visionOfLogical(weights, model, path) };
}

function mergeGiven(source: SourceCheckpoint, given: string): TensorStore {
	const { weights, path } = source;
	const model = adaptedModel(source);
	if (model === null) throw new UserError(`${path} does not say what model it holds, which --adapters needs.`);
	const adapters = openPeftFolder(given, model);
	const optimizer = [...weights.tensors.keys()].find((name) => name.startsWith("optimizer."));
	if (optimizer !== undefined) {
		throw new UserError(
			`${path} has an optimizer, whose weights --adapters would leave behind; --no-optimizer leaves it out.`,
		);
	}
	return new MergedStore(joinStores(path, [weights, adapters.weights]), scaleOf(keysOf(adapters.settings))!);
}

const keysOf = ({ rank, alpha }: AdapterSettings) => ({ loraRank: rank, loraAlpha: alpha });

function settingsOf({ model, path }: SourceCheckpoint): AdapterSettings & { readonly scale: number } {
	const scale = scaleOf(model);
	const { loraRank, loraAlpha, loraDropout } = model;
	if (scale === null) throw new UserError(`${path} has adapters, but does not say their rank and α.`);
	return { scale, rank: Number(loraRank), alpha: Number(loraAlpha), dropout: Number(loraDropout ?? 0) };
}

/** Sentences about parts of a source that have trained whole, for which its adapters' folder has no place. */
function trainedWhole({ weights, model, path }: SourceCheckpoint): string[] {
	const names = [...weights.tensors.keys()];
	const parts = [
		["vision tower", model.freezeVit, towerPrefix],
		["projector", model.freezeProjection, projectorPrefix],
	] as const;
	return parts
		.filter(([, frozen, prefix]) => {
			const own = names.filter((name) => name.startsWith(prefix));
			return frozen === false && own.length > 0 && !own.some(isAdapterName);
		})
		.map(
			([part]) =>
				`${path}: the ${part} has trained whole, and a PEFT folder holds adapters alone: it is left out (--to hf writes the whole model).`,
		);
}

/** Plans a PEFT folder for the adapters of a source. */
export function peftTarget(
	source: SourceCheckpoint,
	adapters: TensorStore,
	path: string,
	{ names, sync }: { readonly names: SpellingName | null } & Durability,
): PlannedAdapters {
	const model = adaptedModel(source);
	if (model === null) throw new UserError(`${source.path} does not say what model its adapters are of.`);
	const config = source.objects.get(configObject);
	const { language, ...vision } = spellingIn(source.spelling);
	const base = {
		stored: language && storedSpelling(language, vision),
		configText: config === undefined ? null : new TextDecoder().decode(config.bytes),
		whole: [...source.weights.tensors.keys()].some((name) => name.startsWith(towerPrefix)),
	};
	const chosen = moduleSpelling(base, names);
	const { loadHf } = source.model;
	const named = typeof loadHf === "string" ? loadHf : null;
	const planned = planPeftFolder(adapters, settingsOf(source), model, { spelling: chosen, base: named, path, sync });
	return { ...planned, warnings: [...planned.warnings, ...trainedWhole(source)] };
}
