/** Hugging Face folders as source and target of conversions: NemotronH, a RADIO tower, or both in one model. */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../../native/errors.ts";
import { type Durability, OutputFile, readWholeFile } from "../files.ts";
import {
	configurationFromHuggingFace,
	configurationToHuggingFace,
	type LanguageModelConfiguration,
} from "../hf/configuration.ts";
import { HuggingFaceFolder, readConfig, writeHuggingFaceFiles } from "../hf/folder.ts";
import { formatPythonJson, parsePythonJson } from "../hf/json.ts";
import {
	addLanguage,
	detectSpelling,
	requireCounts,
	type Spelling,
	type SpellingName,
	spellings,
} from "../hf/language-names.ts";
import { LayerScaledStore } from "../hf/layer-scale.ts";
import { describeLeftOut, isLeftOut } from "../hf/left-out.ts";
import { withoutTiedHead } from "../hf/model.ts";
import { detectTower, headsOfConfig, visionFromHuggingFace, visionToHuggingFace } from "../hf/vision-names.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../mapping.ts";
import type { Json } from "../native/manifest.ts";
import { selectTensors, type TensorStore } from "../store.ts";
import type { JsonObject, SourceCheckpoint, SourceOptions, StoredObject } from "./source.ts";

/** Object of a native checkpoint that keeps the source's config.json. */
export const configObject = "huggingface/config.json";

/** Where vision-language models keep the language model's configuration. */
const languageConfigs = ["llm_config", "text_config", "language_config"];

/** The NemotronH part of a config.json, or null if there is none. */
export function languageConfig(
	json: Readonly<Record<string, unknown>>,
	path: string,
): LanguageModelConfiguration | null {
	if (json.model_type === "nemotron_h") return configurationFromHuggingFace(json, path);
	for (const key of languageConfigs) {
		const nested = json[key];
		if (typeof nested === "object" && nested !== null && !Array.isArray(nested)) {
			return configurationFromHuggingFace({ model_type: "nemotron_h", ...nested }, `${path} (${key})`);
		}
	}
	return null;
}

export function openHuggingFaceSource(path: string, options: SourceOptions): SourceCheckpoint {
	const folder = HuggingFaceFolder.open(path);
	try {
		const json = parsePythonJson(folder.configText, folder.configPath);
		const spelling = detectSpelling(folder.tensors.keys());
		const tower = detectTower(folder.tensors.keys());
		const configuration = spelling ? languageConfig(json, folder.configPath) : null;
		if (spelling && !configuration) {
			throw new UserError(`${folder.configPath} describes no NemotronH model (model_type "nemotron_h").`);
		}
		if (!spelling && tower === null) throw new UserError(`${path} holds neither a NemotronH model nor a RADIO tower.`);
		const builder = new CorrespondenceBuilder(path);
		let store: TensorStore = folder;
		if (spelling && configuration) {
			requireCounts(configuration, spelling, folder.tensors, folder.configPath);
			addLanguage(builder, configuration, spelling);
			if (!configuration.untieEmbeddingsAndOutputWeights) store = withoutTiedHead(folder, spelling);
		}
		const heads = tower === null ? null : agreedHeads(options.visionHeads, headsOfConfig(json), folder.configPath);
		const scaled = new LayerScaledStore(selectTensors(store, (name) => !isLeftOut(name)));
		if (tower !== null) visionFromHuggingFace(builder, scaled.tensors, tower, heads, path);
		const weights = new MappedStore(scaled, planTensors(scaled, builder, "logical"));
		const objects = new Map<string, StoredObject>([
			[configObject, { encoding: "json", bytes: new TextEncoder().encode(folder.configText) }],
		]);
		const notices = describeLeftOut(folder);
		if (scaled.scales.length > 0) {
			notices.push(`${path}: ${scaled.scales.length} layer scales are multiplied into the projections before them.`);
		}
		return {
			format: "hf",
			path,
			notices,
			weights,
			stored: folder,
			configuration,
			model: {
				...(configuration as unknown as JsonObject | null),
				...(heads === null ? {} : { visionNumAttentionHeads: heads }),
			},
			iteration: null,
			common: {},
			spelling: { huggingFace: spelling as unknown as Json },
			objects,
			[Symbol.dispose]: () => folder[Symbol.dispose](),
		};
	} catch (error) {
		folder[Symbol.dispose]();
		throw error;
	}
}

/** What the flag says, or config.json; they must not say different numbers. */
function agreedHeads(flag: number | null, config: number | null, path: string): number | null {
	if (flag !== null && config !== null && flag !== config) {
		throw new UserError(`${path} says ${config} heads of the vision tower, --vision-num-attention-heads ${flag}.`);
	}
	return flag ?? config;
}

export interface HuggingFaceTargetOptions extends Durability {
	/** null: as the source was spelled, published otherwise. */
	readonly names: SpellingName | null;
	readonly visionHeads: number | null;
	/** A folder whose config.json, tokenizer and code are copied. */
	readonly reference: string | null;
	readonly shardBytes: number;
}

export interface HuggingFaceTarget {
	readonly tensors: TensorStore;
	readonly write: (folder: string, onBytes: (bytes: number) => void) => void;
}

/** Plans a folder for a source's model tensors; optimizer state has no place in it. */
export function huggingFaceTarget(
	source: SourceCheckpoint,
	weights: TensorStore,
	path: string,
	options: HuggingFaceTargetOptions,
): HuggingFaceTarget {
	const model = selectTensors(weights, (name) => !name.startsWith("optimizer."));
	const vision = [...model.tensors.keys()].some((name) => name.startsWith("modality_submodules."));
	const language = [...model.tensors.keys()].some((name) => name.startsWith("language_model."));
	const kept = source.objects.get(configObject);
	const reference = options.reference === null ? null : readConfig(options.reference);
	const original = reference ?? (kept ? new TextDecoder().decode(kept.bytes) : null);
	const configuration =
		(original === null ? null : languageConfig(parsePythonJson(original, path), path)) ?? source.configuration;
	const spelling = spellingFor(source, options.names, vision);

	const builder = new CorrespondenceBuilder(path);
	if (language) {
		if (!configuration) {
			throw new UserError(
				`${source.path} does not say what model it holds; name a folder with its config.json in --hf-reference.`,
			);
		}
		const rows = model.tensors.get("language_model.embedding.word_embeddings.weight")?.shape[0];
		addLanguage(builder, configuration, spelling, {
			paddedVocabularySize: Math.max(rows ?? configuration.vocabSize, configuration.vocabSize),
		});
	}
	const trained = source.model.visionNumAttentionHeads;
	const heads = options.visionHeads ?? (typeof trained === "number" ? trained : null);
	const homeless = visionToHuggingFace(builder, model.tensors, heads, path);
	if (homeless.length > 0) {
		throw new UserError(
			`Hugging Face's format has no place for ${homeless.join(", ")}; leave ${homeless.length === 1 ? "it" : "them"} out with --drop.`,
		);
	}
	const tensors = new MappedStore(model, planTensors(model, builder, "foreign"));
	const configText = original ?? makeConfig(configuration, model, vision, heads, path);
	return {
		tensors,
		write: (folder, onBytes) => {
			const { shardBytes, sync } = options;
			writeHuggingFaceFiles(folder, tensors, { configText, shardBytes, sync, onBytes });
			if (options.reference !== null) copyCompanions(options.reference, folder, sync);
		},
	};
}

function spellingFor(source: SourceCheckpoint, names: SpellingName | null, vision: boolean): Spelling {
	const kept = source.spelling.huggingFace as unknown as Spelling | null | undefined;
	if (names === null && kept) return kept;
	const base = spellings[names ?? "published"];
	// In a vision-language model the language model is one of two towers.
	const outer = names !== null && kept ? kept.head : vision ? "language_model." : "";
	return { base: outer + base.base, head: outer + base.head, experts: base.experts };
}

/** A config.json for a model that never had one. */
function makeConfig(
	configuration: LanguageModelConfiguration | null,
	model: TensorStore,
	vision: boolean,
	heads: number | null,
	path: string,
): string {
	const dtypes: Readonly<Record<string, string>> = { F32: "float32", BF16: "bfloat16", F16: "float16" };
	const first = [...model.tensors.values()][0]?.dtype ?? "F32";
	const dtype =
		dtypes[model.tensors.get("language_model.embedding.word_embeddings.weight")?.dtype ?? first] ?? "float32";
	const language = configuration ? configurationToHuggingFace(configuration, dtype, path) : null;
	if (!vision) return formatPythonJson(language);
	return formatPythonJson({
		model_type: "NemotronH_Nano_VL_V2",
		...(language ? { llm_config: language } : {}),
		vision_config: {
			model_type: "radio",
			...(heads === null ? {} : { num_attention_heads: heads }),
			torch_dtype: dtype,
		},
		torch_dtype: dtype,
	});
}

/** A tokenizer has some ten million bytes. */
const LARGEST_COMPANION = 2 ** 28;

/** Tokenizer, generation settings and model code; never weights. */
function copyCompanions(reference: string, folder: string, sync: Durability["sync"]): void {
	const wanted =
		/^(tokenizer.*|special_tokens_map\.json|vocab\.(json|txt)|merges\.txt|generation_config\.json|preprocessor_config\.json|processor_config\.json|chat_template\..*|.*\.py|LICENSE.*)$/;
	for (const name of readdirSync(reference).filter((name) => wanted.test(name))) {
		const bytes = readWholeFile(join(reference, name), LARGEST_COMPANION);
		using file = new OutputFile(join(folder, name), { sync });
		file.write(bytes);
		file.close();
	}
}
