/**
 * The parts of a model that a Hugging Face folder holds: a language model of any family (families/), a RADIO tower, the projector between them, or all
 * of a vision-language model. Every tensor has a place, is left out by name (unused-tensors.ts), or is an error.
 */

import { UserError } from "../../system/errors.ts";
import { type Correspondence, CorrespondenceBuilder, MappedStore, planTensors } from "../mapping.ts";
import { openSafetensors } from "../safetensors.ts";
import { readPieces, selectTensors, type TensorStore } from "../store.ts";
import { withExpertLayout } from "./families/decoder.ts";
import type { LanguageModelConfiguration, Spelling } from "./families/family.ts";
import {
	addLanguage,
	configurationFromHuggingFace,
	detectSpelling,
	familyOf,
	familyOfType,
	modelTypes,
	withDepths,
} from "./families/index.ts";
import { HuggingFaceFolder } from "./folder.ts";
import { parsePythonJson } from "./json.ts";
import { LayerScaledStore } from "./layer-scale.ts";
import { addProjector, detectProjector, type ProjectorSizes, type ProjectorStyle } from "./projector-names.ts";
import { describeLeftOut, isLeftOut } from "./unused-tensors.ts";
import {
	behindTap,
	projectorSizes,
	readsJoinedPatches,
	type TowerConfiguration,
	towerConfig,
	towerConfiguration,
} from "./vision-configuration.ts";
import { addTower, detectTower, type TowerSizes, type TowerSpelling } from "./vision-names.ts";
import { asLlava, asNested } from "./vision-towers.ts";

export interface FolderParts extends Disposable {
	/** Folder or file. */
	readonly path: string;
	/** config.json's path, its text and what it says; a projector's own file has none. */
	readonly configPath: string;
	readonly configText: string | null;
	readonly json: Readonly<Record<string, unknown>>;
	readonly language: { readonly configuration: LanguageModelConfiguration; readonly spelling: Spelling } | null;
	readonly tower: {
		readonly configuration: TowerConfiguration & TowerSizes;
		readonly spelling: TowerSpelling;
	} | null;
	readonly projector: { readonly sizes: ProjectorSizes; readonly style: ProjectorStyle } | null;
	/** image_token_id of config.json; null if absent. */
	readonly imageTokenId: number | null;
	/** Under logical names, layer scales multiplied in. */
	readonly weights: TensorStore;
	/** Tensors as stored. */
	readonly stored: TensorStore;
	/** Names of those that have no place in the model (unused-tensors.ts). */
	readonly leftOut: readonly string[];
	/** Names of the layer scales there. */
	readonly scales: readonly string[];
	/** Sentences about the folder, by which nothing is lost. */
	readonly notices: readonly string[];
	/** Sentences about modules that are left out. */
	readonly warnings: readonly string[];
}

/** Keys under which vision-language models nest the language model's configuration. */
const languageConfigs = ["llm_config", "text_config", "language_config"];

/** The key of a vision-language config.json that holds the language model's; null: it is the language model's itself. */
export function languageKey(json: Readonly<Record<string, unknown>>): string | null {
	if (familyOfType(json.model_type) !== null) return null;
	const isObject = (value: unknown) => typeof value === "object" && value !== null && !Array.isArray(value);
	return languageConfigs.find((key) => isObject(json[key])) ?? null;
}

/**
 * The language model that a config.json describes; null: it describes no model of these families. `depths`: of multi-token prediction that
 * there are tensors of; beside a tower they are not trained.
 */
export function languageConfig(
	json: Readonly<Record<string, unknown>>,
	path: string,
	depths: number,
): LanguageModelConfiguration | null {
	if (familyOfType(json.model_type) !== null) return configurationFromHuggingFace(withDepths(json, depths), path);
	const key = languageKey(json);
	if (key === null) return null;
	const own = { model_type: "nemotron_h", ...(json[key] as object), ...tying(json) };
	return configurationFromHuggingFace(withDepths(own, 0), `${path} (${key})`);
}

/** Whether these models' output layer is the embedding stands beside the language model's section. */
function tying({ model_type: type, tie_word_embeddings: tied }: Readonly<Record<string, unknown>>) {
	if (type === "internvl") return { tie_word_embeddings: tied ?? true };
	if (/^(qwen\d|glm4v)/.test(String(type))) return tied === undefined ? {} : { tie_word_embeddings: tied };
	return /^llava/.test(String(type)) && tied === true ? { tie_word_embeddings: true } : {};
}

/**
 * Opens a folder, or a .safetensors file with a projector, and checks names and shapes; no weights are read yet. `use`: of a folder that is
 * opened for its tower, which another language model reads.
 */
export function openParts(
	path: string,
	options: {
		readonly visionHeads: number | null;
		readonly use?: "whole" | "tower";
		/** Whether layers of multi-token prediction are left out; default: they are a part of the model. */
		readonly withoutDepths?: boolean;
	},
): FolderParts {
	const file = path.endsWith(".safetensors") ? openSafetensors(path) : null;
	const folder = file === null ? HuggingFaceFolder.open(path) : null;
	const stored: TensorStore = (file ?? folder)!;
	try {
		const configPath = folder?.configPath ?? path;
		const said = folder === null ? {} : parsePythonJson(folder.configText, configPath);
		const json = options.use === "tower" ? asLlava(said) : asNested(said);
		const depthOf = familyOfType(json.model_type)?.ahead?.depthOf(json) ?? (() => null);
		const language = languageOf(json, stored, configPath, options.withoutDepths ? () => null : depthOf);
		const tower = towerOf(json, stored, options.visionHeads, configPath);
		const style = detectProjector(stored.tensors);
		const projector = style === null ? null : { sizes: projectorSizes(stored.tensors, style, path, json), style };
		if (language === null && tower === null && projector === null) {
			throw new UserError(
				`${path} holds neither a language model (${modelTypes.join(", ")}) nor a vision tower, nor a projector.`,
			);
		}
		const names = namesOf({ language, tower, projector, path });
		requireConfig(json, projector?.sizes ?? null, tower?.configuration ?? null, configPath);
		const isAhead = (name: string) => options.withoutDepths === true && depthOf(name) !== null;
		const leftOut = [...stored.tensors.keys()].filter(
			(name) => !names.foreign.has(name) && (isAhead(name) || isLeftOut(name)),
		);
		const { notices, warnings } = describeLeftOut(stored, leftOut, towerConfig(json));
		if (folder !== null && folder.notice !== null) notices.push(folder.notice);
		const unread = behindTap(json, tower?.spelling ?? null, configPath);
		const behind = [...stored.tensors.keys()].filter(unread);
		if (behind.length > 0) {
			notices.push(
				`${path}: ${behind[0]} and ${behind.length - 1} more are left out: they are behind the layer of the tower that the model reads.`,
			);
		}
		const tied = language && !language.configuration.untieEmbeddingsAndOutputWeights;
		const unused = new Set(tied ? [...leftOut, `${language.spelling.head}lm_head.weight`] : leftOut);
		const scaled = new LayerScaledStore(selectTensors(stored, (name) => !unused.has(name) && !unread(name)));
		if (scaled.scales.length > 0) {
			notices.push(`${path}: ${scaled.scales.length} layer scales are multiplied into the projections before them.`);
		}
		if (language) requireGivenSizes(json, language, stored, configPath);
		const weights = new MappedStore(scaled, planTensors(scaled, names, "logical"));
		const { scales } = scaled;
		const imageTokenId = imageTokenOf(json, configPath);
		return {
			...{ path, configPath, configText: folder?.configText ?? null, json, language, tower, projector },
			...{ imageTokenId, weights, stored, leftOut, scales, notices, warnings },
			[Symbol.dispose]: () => stored[Symbol.dispose](),
		};
	} catch (error) {
		stored[Symbol.dispose]();
		throw error;
	}
}

/** Tensors of a folder's parts and the logical ones. */
export function namesOf({
	language,
	tower,
	projector,
	path,
}: Pick<FolderParts, "language" | "tower" | "projector" | "path">): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	if (language) addLanguage(builder, language.configuration, language.spelling);
	if (tower) addTower(builder, tower.configuration, tower.spelling, path);
	if (projector) addProjector(builder, projector.sizes, projector.style);
	return builder;
}

/** model_type of the language model that a config.json describes. */
export function languageType(json: Readonly<Record<string, unknown>>): unknown {
	const key = languageKey(json);
	return (key === null ? json : (json[key] as typeof json)).model_type;
}

function languageOf(
	json: FolderParts["json"],
	stored: TensorStore,
	configPath: string,
	depthOf: (name: string) => number | null,
): FolderParts["language"] {
	const spelling = detectSpelling(stored.tensors.keys(), languageType(json));
	if (spelling === null) return null;
	let depths = 0;
	for (const name of stored.tensors.keys()) depths = Math.max(depths, (depthOf(name) ?? -1) + 1);
	const configuration = languageConfig(json, configPath, depths);
	if (configuration === null) {
		throw new UserError(`${configPath} describes no language model of ${modelTypes.join(", ")} (model_type).`);
	}
	const stacked = withExpertLayout(spelling, configuration, stored.tensors);
	familyOf(stacked).requireCounts(configuration, stacked, stored.tensors, configPath);
	const untied = configuration.untieEmbeddingsAndOutputWeights || hasOwnHead(stored, spelling);
	return { configuration: { ...configuration, untieEmbeddingsAndOutputWeights: untied }, spelling: stacked };
}

function towerOf(
	json: FolderParts["json"],
	stored: TensorStore,
	flag: number | null,
	path: string,
): FolderParts["tower"] {
	const spelling = detectTower(stored.tensors);
	if (spelling === null) return null;
	return {
		configuration: towerConfiguration(json, stored.tensors, spelling, { flag, path, folder: stored.path }),
		spelling,
	};
}

/** A size that config.json leaves out has transformers' default: where tensors have another, its key is what is missing. */
function requireGivenSizes(
	json: FolderParts["json"],
	{ configuration, spelling }: NonNullable<FolderParts["language"]>,
	stored: TensorStore,
	path: string,
): void {
	const family = familyOf(spelling);
	const embedding = `${spelling.base}${family.embedding}`;
	const shape = stored.tensors.get(embedding)?.shape;
	const key = languageKey(json);
	const missing = family.missing(key === null ? json : (json[key] as FolderParts["json"]));
	for (const [name, found, expected] of [
		["vocab_size", shape?.[0], configuration.vocabSize],
		["hidden_size", shape?.[1], configuration.hiddenSize],
	] as const) {
		if (!missing.has(name) || found === undefined || found === expected) continue;
		throw new UserError(
			`${path} has no ${name}: transformers takes ${expected} then, but tensor ${embedding} has ${found}.`,
		);
	}
}

/** Checks config.json of a vision-language model: its projector, and how patches are joined. */
function requireConfig(
	json: FolderParts["json"],
	projector: ProjectorSizes | null,
	tower: TowerConfiguration | null,
	path: string,
): void {
	const bad = (sentence: string): never => {
		throw new UserError(`${path}: ${sentence}.`);
	};
	if (tower === null) return;
	const { ps_version: order, downsample_ratio: ratio, projector_hidden_size: hidden } = json;
	if (order !== undefined && order !== null && order !== "v2") {
		bad(`ps_version is ${JSON.stringify(order)}, this program's pixel shuffle has only "v2"`);
	}
	const width = [json.vit_hidden_size, json.vision_hidden_size].find((value) => typeof value === "number");
	if (width !== undefined && width !== tower.visionHiddenSize) {
		bad(`vision_hidden_size (vit_hidden_size) is ${width}, but the tower has ${tower.visionHiddenSize}`);
	}
	if (projector === null) return;
	const joined = readsJoinedPatches(projector.input, tower, path, path);
	if (typeof ratio === "number" && ratio !== (joined ? 0.5 : 1)) {
		bad(`downsample_ratio is ${ratio}, but the projector reads rows of ${projector.input}`);
	}
	if (typeof hidden === "number" && hidden !== projector.visionProjectionFfnHiddenSize) {
		bad(`projector_hidden_size is ${hidden}, but the projector has ${projector.visionProjectionFfnHiddenSize}`);
	}
}

function imageTokenOf(json: FolderParts["json"], path: string): number | null {
	const id = json.image_token_id ?? json.image_token_index ?? json.img_context_token_id ?? null;
	if (id === null || (Number.isSafeInteger(id) && (id as number) >= 0)) return id as number | null;
	throw new UserError(`${path}: image_token_id is ${JSON.stringify(id)}, expected a whole number.`);
}

/** The folder's description of its model, under the program's keys. */
export function describeParts({
	language,
	tower,
	projector,
	imageTokenId,
	path,
}: FolderParts): Record<string, unknown> {
	const described: Record<string, unknown> = { ...language?.configuration };
	if (tower) {
		const { positions: _, ...configuration } = tower.configuration;
		Object.assign(described, configuration);
	}
	if (projector) {
		const { input, output: _, deepstack: __, ...sizes } = projector.sizes;
		Object.assign(described, sizes.visionProjectionType === "mlp" ? sizes : { visionProjectionType: "affine" });
		if (tower) {
			described.pixelShuffle = readsJoinedPatches(input, tower.configuration, path, path);
			// Published models drop the class tokens.
			described.disableVisionClassToken = true;
		}
	}
	if (imageTokenId !== null) described.imageTokenId = imageTokenId;
	return described;
}

/** Whether a folder has another lm_head than its embedding: transformers then ties neither, whatever config.json says. */
function hasOwnHead(folder: TensorStore, spelling: Spelling): boolean {
	const [head, embedding] = [`${spelling.head}lm_head.weight`, spelling.base + familyOf(spelling).embedding];
	if (!folder.tensors.has(head) || !folder.tensors.has(embedding)) return false;
	const other = readPieces(folder, embedding);
	for (const piece of readPieces(folder, head)) {
		if (Buffer.compare(piece, other.next().value ?? new Uint8Array(0)) !== 0) return true;
	}
	return false;
}

export interface HuggingFaceModel extends Disposable {
	readonly configuration: LanguageModelConfiguration;
	readonly spelling: Spelling;
	/** config.json as it stands in the folder. */
	readonly configText: string;
	/** Tensors under logical names; reads one at a time from the folder. */
	readonly weights: TensorStore;
}

/**
 * Opens the folder of a language model alone, its weights under Megatron's logical names (docs/spec/checkpoint.md §4,
 * docs/spec/language-model.md §10), and checks names and shapes: every missing, unexpected and mis-shaped tensor is named. No weights
 * are read yet.
 */
export function openHuggingFaceModel(path: string): HuggingFaceModel {
	const parts = openParts(path, { visionHeads: null });
	const { language, tower, projector, configText, weights } = parts;
	if (language === null || tower !== null || projector !== null) {
		parts[Symbol.dispose]();
		throw new UserError(`${path} is not of a language model alone.`);
	}
	return { ...language, configText: configText ?? "{}", weights, [Symbol.dispose]: () => parts[Symbol.dispose]() };
}
