/**
 * A Hugging Face folder of a model under logical names: the language model, the tower, both, or a vision-language model with
 * its projector. Names, config.json and the files beside it are those of the folder that the model came from, otherwise
 * made.
 */
import { lackingOfPublished } from "../../config/published-model.ts";
import { UserError } from "../../system/errors.ts";
import type { Durability } from "../files.ts";
import { CorrespondenceBuilder, MappedStore, planTensors } from "../mapping.ts";
import { joinStores, selectTensors, type TensorStore } from "../store.ts";
import { type Companions, writeCompanions } from "./companions.ts";
import type { LanguageModelConfiguration, Spelling } from "./families/family.ts";
import { addLanguage, configurationToHuggingFace, familyOfType, spellingFor } from "./families/index.ts";
import { type SpellingName, spellings } from "./families/nemotron-h-names.ts";
import { type Share, writeHuggingFaceFiles } from "./folder.ts";
import { type ImageFiles, lackingOfImages, writeImageProcessor } from "./image-processor.ts";
import { formatPythonJson, parseKeepingFloats, parsePythonJson } from "./json.ts";
import type { FolderSpelling, KeptFolder } from "./kept-folder.ts";
import { languageConfig, languageKey, languageType } from "./parts.ts";
import { addProjector, detectProjector, type ProjectorSizes } from "./projector-names.ts";
import { projectorSizes, towerOfLogical } from "./vision-configuration.ts";
import { grownVideoEmbedder, towerJson, videoEmbedderName, wholeJson } from "./vision-language-config.ts";
import { addTower, publishedTower, type TowerSizes } from "./vision-names.ts";

export interface WritableModel {
	/** Path of the source, for errors. */
	readonly path: string;
	/** Model tensors under logical names. */
	readonly weights: TensorStore;
	/** null: unknown. */
	readonly language: LanguageModelConfiguration | null;
	/** Other known values of the model, under the program's keys. */
	readonly described: Readonly<Record<string, unknown>>;
	/** The kept part of the source folder; null: it came from none. */
	readonly kept: Omit<KeptFolder, "companions"> | null;
	/** Files to write beside it. */
	readonly companions: Companions;
}

export interface FolderOptions extends Durability {
	/** Spelling of the language model; null: as it came, published otherwise. */
	readonly names: SpellingName | null;
	readonly visionHeads: number | null;
	readonly shardBytes: number;
}

export interface PlannedFolder {
	readonly tensors: TensorStore;
	/** `share`: of several processes that write it together, what this one does; default: all. */
	readonly write: (folder: string, onBytes?: (bytes: number) => void, share?: Share | null) => void;
}

type Json = Readonly<Record<string, unknown>>;

/** The parts of a model that are there; null: absent. */
interface Present {
	readonly language: boolean;
	readonly tower: TowerSizes | null;
	readonly projector: ProjectorSizes | null;
}

/** Plans a folder; every tensor has a place in it, or one error names those without. */
export function planFolder(model: WritableModel, path: string, options: FolderOptions): PlannedFolder {
	const { weights, kept } = model;
	const names = [...weights.tensors.keys()];
	const tower = towerOfLogical(weights, { ...model.described, ...given(options.visionHeads) }, path);
	const style = detectProjector(weights.tensors);
	const projector = style === null ? null : projectorSizes(weights.tensors, style, weights.path);
	const present = { language: names.some((name) => name.startsWith("language_model.")), tower, projector };
	const original = kept === null ? null : parsePythonJson(kept.configText, `config.json of ${model.path}`);
	const fits = original !== null && describesAll(original, present);

	const builder = new CorrespondenceBuilder(path);
	const depths = new Set(names.map((name) => /^language_model\.mtp\.layers\.(\d+)\./.exec(name)?.[1]));
	depths.delete(undefined);
	const described = (original === null ? null : languageConfig(original, path, depths.size)) ?? model.language;
	// A head of its own is written, whatever config.json says.
	const headed = weights.tensors.has("language_model.output_layer.weight");
	const language = described && headed ? { ...described, untieEmbeddingsAndOutputWeights: true } : described;
	const ownNames = options.names === null ? (kept?.spelling.language ?? null) : null;
	const spelling = folderSpelling(
		kept,
		present,
		fits,
		ownNames ??
			(language === null
				? spellings.published
				: spellingFor(language, options.names, original && languageType(original))),
	);
	if (present.language) {
		if (language === null) {
			throw new UserError(
				`${model.path} does not say what model it holds; name a folder with its config.json in --hf-reference.`,
			);
		}
		const rows = weights.tensors.get("language_model.embedding.word_embeddings.weight")?.shape[0];
		const paddedVocabularySize = Math.max(rows ?? language.vocabSize, language.vocabSize);
		addLanguage(builder, language, spelling.language!, { paddedVocabularySize });
	}
	if (tower) addTower(builder, tower, spelling.tower!, path);
	if (projector?.visionProjectionType === "mlp") addProjector(builder, projector, spelling.projector!);
	if (!fits && present.language && tower && projector) {
		const lacking = lackingOfPublished(model.described);
		if (lacking !== null) throw new UserError(`${model.path}: ${lacking}.`);
	}
	// A model that Hugging Face cannot describe is refused before its tensors are compared.
	const config = fits ? original! : makeConfig(model, language, present, dtypeOf(weights), path);
	requireHomes(names, builder);
	const mapped = new MappedStore(weights, planTensors(weights, builder, "foreign"));
	const leftOut =
		kept !== null && fits ? selectTensors(kept.leftOut, (name) => !builder.foreign.has(name)) : joinStores(path, []);
	requireModules(config, leftOut, model.path);
	const frames = (config.vision_config as Json | undefined)?.video_temporal_patch_size;
	const more = [leftOut];
	if (tower && typeof frames === "number" && !leftOut.tensors.has(videoEmbedderName(spelling.tower!))) {
		more.push(grownVideoEmbedder(mapped, spelling.tower!, frames));
	}
	const tensors = joinStores(mapped.path, [mapped, ...more]);
	const configText = fits ? withDtype(kept!.configText, dtypeOf(weights)) : formatPythonJson(config);
	const own = { configText, companions: model.companions };
	const files = present.language && tower ? withImages(own, model, tower.patchDim) : own;
	return {
		tensors,
		write: (folder, onBytes = () => {}, share = null) => {
			writeHuggingFaceFiles(folder, tensors, { ...options, configText: files.configText, onBytes, share });
			if (share?.first !== false) writeCompanions(folder, files.companions, options);
		},
	};
}

const given = (heads: number | null) => (heads === null ? {} : { visionNumAttentionHeads: heads });

/** Whether a config.json is of a model with these parts, no more and no fewer. */
function describesAll(json: Json, { language, tower }: Present): boolean {
	const whole = typeof json.vision_config === "object" && json.vision_config !== null;
	if (whole) return language && tower !== null;
	return language ? tower === null : tower !== null;
}

function folderSpelling(
	kept: WritableModel["kept"],
	{ language, tower }: Present,
	fits: boolean,
	base: Spelling,
): FolderSpelling {
	const whole = language && tower !== null;
	const own = kept?.spelling.language ?? null;
	// In a vision-language model the language model is one of two.
	const outer = fits && own !== null ? own.head : whole ? "language_model." : "";
	const inner = base.base.slice(base.head.length);
	const style = kept?.spelling.projector ?? null;
	return {
		language: { ...base, base: outer + inner, head: outer },
		tower: (fits ? kept?.spelling.tower : null) ?? publishedTower,
		projector: style === null || style === "logical" ? "published" : style,
	};
}

/** Tensors of the tower and the projector that Hugging Face's models lack. */
function requireHomes(names: readonly string[], { logical }: CorrespondenceBuilder): void {
	const homeless = names.filter((name) => name.startsWith("modality_submodules.") && !logical.has(name));
	if (homeless.length === 0) return;
	throw new UserError(
		`Hugging Face's format has no place for ${homeless.join(", ")}; leave ${homeless.length === 1 ? "it" : "them"} out with --drop.`,
	);
}

/** A config.json with a sound encoder is of a folder with its tensors. */
function requireModules(config: Json, leftOut: TensorStore, path: string): void {
	const key = ["sound_config", "audio_config"].find(
		(name) => typeof config[name] === "object" && config[name] !== null,
	);
	const there = [...leftOut.tensors.keys()].some((name) => /^(sound_encoder|audio_tower)\./.test(name));
	if (key === undefined || there) return;
	throw new UserError(
		`${path} came from a model with a sound encoder (${key}), whose tensors it does not keep; name the folder with them in --hf-reference.`,
	);
}

const torchNames: Readonly<Record<string, string>> = { F32: "float32", BF16: "bfloat16", F16: "float16" };

/** torch's name of the type that most of the weights have. */
function dtypeOf({ tensors }: TensorStore): string {
	const first = tensors.get("language_model.embedding.word_embeddings.weight") ?? [...tensors.values()][0];
	return torchNames[first?.dtype ?? "F32"] ?? "float32";
}

/** Text of a config.json whose model may have been of another type. */
function withDtype(text: string, dtype: string): string {
	return text.replace(/("(?:torch_)?dtype":\s*)"(?:float32|bfloat16|float16)"/g, (_, key) => `${key}"${dtype}"`);
}

/** A config.json for a model that came from none, or from one of a part of it. */
function makeConfig(
	{ described, kept, path: source }: WritableModel,
	language: LanguageModelConfiguration | null,
	present: Present,
	dtype: string,
	path: string,
): Json {
	const original = kept === null ? null : parseKeepingFloats(kept.configText, `config.json of ${source}`);
	const text = present.language ? languageJson(language!, original, dtype, path) : null;
	if (present.tower === null) return text ?? {};
	const activation = described.visionActivation === "gelu" ? "gelu" : "gelu-tanh";
	const section = (original?.vision_config ?? original ?? {}) as Json;
	const vision = towerJson(present.tower, activation, dtype, section);
	if (text === null) return { architectures: ["RadioModel"], ...vision };
	const { imageTokenId } = described;
	return wholeJson({
		...{ language: text, tower: vision, projector: present.projector, dtype },
		imageTokenId: typeof imageTokenId === "number" ? imageTokenId : null,
	});
}

/** The language model's part of config.json, kept from the source folder if there is one. */
function languageJson(language: LanguageModelConfiguration, original: Json | null, dtype: string, path: string): Json {
	if (original !== null && familyOfType(original.model_type) !== null) return original;
	const key = original === null ? null : languageKey(original);
	if (key !== null) return { model_type: "nemotron_h", ...(original![key] as object) };
	return configurationToHuggingFace(language, dtype, path);
}

/** The files of a vision-language model, whose image processor says how its images were made. */
function withImages(files: ImageFiles, { described, path }: WritableModel, patchSize: number): ImageFiles {
	const lacking = lackingOfImages(files, described, path);
	if (lacking === null) return writeImageProcessor(files, described, { patchSize, path });
	throw new UserError(`${path}: ${lacking}; --hf-reference names a folder whose processor is taken as it is.`);
}
