/**
 * The Hugging Face folders that a training starts from (--load-hf, --load-vision, --load-projector) as one model: whose
 * tensors are whose, what they say of it, and the folder that it would be. The tower may be of Megatron's checkpoint.
 */
import { UserError } from "../../system/errors.ts";
import { detectFormat } from "../conversion/source.ts";
import { joinStores, selectTensors, type TensorStore } from "../store.ts";
import { openMegatronTower } from "../torch-dist/tower.ts";
import { type Companions, preprocessorOf } from "./companions.ts";
import { spellings } from "./families/nemotron-h-names.ts";
import { formatPythonJson, parseKeepingFloats } from "./json.ts";
import { type KeptFolder, keepFolder, ones } from "./kept-folder.ts";
import { describeParts, type FolderParts, openParts } from "./parts.ts";
import { type ProjectorSizes, projectorPrefix } from "./projector-names.ts";
import { behindTap, readsJoinedPatches, towerConfig } from "./vision-configuration.ts";
import { llavaJson, towerJson, videoEmbedderName, wholeJson } from "./vision-language-config.ts";
import { blockPrefix, publishedTower, type TowerSizes, towerPrefix } from "./vision-names.ts";
import { asLlava, defaultFeatureLayer, isTowerType } from "./vision-towers.ts";

/** Paths; null: not given. */
export interface PretrainedPaths {
	readonly loadHf: string | null;
	readonly loadVision: string | null;
	readonly loadProjector: string | null;
	/** 0: layers of multi-token prediction are left out; absent: they are a part of the model. */
	readonly mtpNumLayers?: number | undefined;
}

/** Values that a folder states for a model, under the program's keys, and the file that states them. */
export interface Description {
	/** config.json, or a file of weights. */
	readonly from: string;
	readonly keys: Readonly<Record<string, unknown>>;
}

export interface Pretrained extends Disposable {
	/** The folder that each part comes from; null: none has it. */
	readonly language: FolderParts | null;
	readonly tower: FolderParts | null;
	readonly projector: FolderParts | null;
	readonly descriptions: readonly Description[];
	/** Tensors of all parts under logical names. */
	readonly weights: TensorStore;
	readonly notices: readonly string[];
}

const isTower = (name: string) => name.startsWith(towerPrefix);
const isProjector = (name: string) => name.startsWith(projectorPrefix);
const isLanguage = (name: string) => !isTower(name) && !isProjector(name);

/** Opens the folders and checks that they fit together; null: no folder is given. No weights are read yet. */
export function openPretrained(paths: PretrainedPaths, visionHeads: number | null = null): Pretrained | null {
	const opened = new Map<string, FolderParts>();
	const open = (path: string | null): FolderParts | null => {
		if (path === null) return null;
		const use = path === paths.loadVision && path !== paths.loadHf ? "tower" : "whole";
		const parts = opened.get(path) ?? openParts(path, { visionHeads, use, withoutDepths: paths.mtpNumLayers === 0 });
		opened.set(path, parts);
		return parts;
	};
	const dispose = () => {
		for (const parts of opened.values()) parts[Symbol.dispose]();
	};
	try {
		const ofMegatron = paths.loadVision !== null && detectFormat(paths.loadVision) === "torch_dist";
		const [main, own] = [open(paths.loadHf), open(paths.loadProjector)];
		const vision = ofMegatron ? openMegatronTower(paths.loadVision!, { visionHeads }) : open(paths.loadVision);
		if (ofMegatron) opened.set(vision!.path, vision!);
		if (main === null && vision === null && own === null) return null;
		const language = main;
		requirePart(main?.language, paths.loadHf, "language model", "--load-hf");
		requirePart(vision?.tower, paths.loadVision, "vision tower", "--load-vision");
		requirePart(own?.projector, paths.loadProjector, "projector", "--load-projector");
		requireOnce(main?.tower, paths.loadHf, "vision tower", "--load-vision", paths.loadVision);
		requireOnce(main?.projector, paths.loadHf, "projector", "--load-projector", paths.loadProjector);
		const tower = vision ?? (main?.tower ? main : null);
		const projector = own ?? (main?.projector ? main : null);
		requireWidths(language, tower, projector);
		const weights = joinStores(
			[...opened.keys()].join(", "),
			[
				language && selectTensors(language.weights, isLanguage),
				tower && selectTensors(tower.weights, isTower),
				projector && selectTensors(projector.weights, isProjector),
			].filter((store) => store !== null),
		);
		requireFloats(weights);
		return {
			...{ language, tower, projector, weights },
			descriptions: describe(language, tower, projector),
			notices: [...opened.values()].flatMap(({ notices, warnings }) => [...notices, ...warnings]),
			[Symbol.dispose]: dispose,
		};
	} catch (error) {
		dispose();
		throw error;
	}
}

/** Keys of a tower that its tensors' names and shapes say. */
const ofTensors: ReadonlySet<string> = new Set<keyof TowerSizes>([
	...(["visionNumLayers", "visionHiddenSize", "visionFfnHiddenSize", "classTokenLen", "patchDim"] as const),
	...(["visionPatchBias", "visionClassTokenPositions", "visionFinalLayernorm"] as const),
]);

function requirePart(part: object | null | undefined, path: string | null, what: string, flag: string): void {
	if (path !== null && !part) throw new UserError(`${path} (${flag}) holds no ${what}.`);
}

function requireOnce(
	part: object | null | undefined,
	path: string | null,
	what: string,
	flag: string,
	given: string | null,
) {
	if (part && given !== null)
		throw new UserError(`${path} (--load-hf) holds a ${what}: ${flag} ${given} would be a second one.`);
}

function requireWidths(language: FolderParts | null, tower: FolderParts | null, projector: FolderParts | null): void {
	if (projector === null) return;
	const { input, output } = projector.projector!.sizes;
	if (tower) readsJoinedPatches(input, tower.tower!.configuration, projector.path, tower.path);
	const width = language?.language?.configuration.hiddenSize ?? output;
	if (output === width) return;
	throw new UserError(
		`The projector of ${projector.path} gives rows of ${output}, but the language model of ${language!.path} has width ${width}.`,
	);
}

/** Weights of a run are loaded from these types. */
function requireFloats({ tensors, path }: TensorStore): void {
	for (const [name, { dtype }] of tensors) {
		if (dtype === "F32" || dtype === "BF16" || dtype === "F16") continue;
		throw new UserError(`${name} in ${path} is ${dtype}; weights are F32, BF16 or F16.`);
	}
}

/** Each folder's keys of the parts that are taken from it. */
function describe(
	language: FolderParts | null,
	tower: FolderParts | null,
	projector: FolderParts | null,
): readonly Description[] {
	const list: Description[] = [];
	const add = (parts: FolderParts, keys: Record<string, unknown>) => list.push({ from: parts.configPath, keys });
	if (language) add(language, describeParts({ ...language, tower: null, projector: null }));
	if (tower) {
		// The token of pictures is the language model's.
		const described = describeParts({ ...tower, language: null, projector: null, imageTokenId: null });
		// Tensors alone do not say the rest.
		const said = Object.entries(described).filter(([key]) => tower.configText !== null || ofTensors.has(key));
		add(tower, Object.fromEntries(said));
	}
	if (projector) {
		// Whether patches are joined follows from the widths of tower and projector.
		const described = describeParts({ ...projector, language: null, tower: tower?.tower ?? null });
		const own = Object.entries(described).filter(([key]) =>
			/^(visionProjection|visionImageNewline|pixelShuffle|disableVision)/.test(key),
		);
		add(projector, Object.fromEntries(own));
	}
	return list;
}

/**
 * The folder that a model of these parts goes back into: the one it came from where that is whole, otherwise one joined under
 * published names. null: too little is known to make a config.json of it. It reads from the folders while it is used.
 */
export function keptOf(
	{ language, tower }: Pretrained,
	options: {
		/** Without modules of gigabytes that the model has no place for. */
		readonly beside: boolean;
		readonly imageTokenId: number;
		/** The run's projector; null: one that published models do not have. */
		readonly projector: ProjectorSizes | null;
	},
): KeptFolder | null {
	if (language === null) return null;
	if (tower === language || tower === null) return keepFolder(language, options);
	const own = keepFolder(tower, { beside: true });
	const main = keepFolder(language, { beside: true });
	const style = tower.tower!.spelling;
	const section = towerConfig(asLlava(jsonOf(tower)));
	if (section.model_type === "siglip_vision_model") return llavaOf({ language, tower }, options, main);
	if (isTowerType(section.model_type)) return null;
	const renamedScale = (name: string) =>
		name.replace(
			/^.*?(\d+)\.(layer_scale[12]\.lambda1)$/,
			(_, block, rest) => blockPrefix(publishedTower, block) + rest,
		);
	const video = videoEmbedderName(style);
	const summary = [...own.leftOut.tensors.keys()].filter((name) => /(^|\.)summary_idxs$/.test(name));
	const renamed = new Map([
		...summary.map((name) => [name, "vision_model.radio_model.summary_idxs"] as const),
		...(own.leftOut.tensors.has(video) ? [[video, videoEmbedderName(publishedTower)] as const] : []),
	]);
	const sizes = tower.tower!.configuration;
	const dtype = String(language.json.dtype ?? language.json.torch_dtype ?? "float32");
	const config = wholeJson({
		language: jsonOf(language),
		// A projector of RADIO's kind is written for RADIO, whose MLPs have no gate.
		tower: towerJson(sizes, sizes.visionActivation === "gelu" ? "gelu" : "gelu-tanh", dtype, section),
		...{ projector: options.projector, imageTokenId: options.imageTokenId, dtype },
	});
	return {
		configText: formatPythonJson(config),
		spelling: {
			language: { base: "language_model.backbone.", head: "language_model.", experts: spellings.published.experts },
			tower: publishedTower,
			projector: "published",
		},
		leftOut: joinStores(tower.path, [
			renamedTensors(tower.stored, renamed),
			ones(tower.stored, tower.scales, renamedScale),
		]),
		companions: withVision(main.companions, tower.path),
	};
}

/** LLaVA of a SigLIP tower and a language model of folders of their own. */
function llavaOf(
	{ language, tower }: { readonly language: FolderParts; readonly tower: FolderParts },
	{ imageTokenId }: { readonly imageTokenId: number },
	main: KeptFolder,
): KeptFolder {
	const dtype = String(language.json.dtype ?? language.json.torch_dtype ?? "float32");
	const layer = Number(tower.json.vision_feature_layer ?? defaultFeatureLayer);
	const parts = { language: jsonOf(language), tower: towerConfig(asLlava(jsonOf(tower))), layer, imageTokenId, dtype };
	const { spelling } = language.language!;
	const { prefix } = tower.tower!.spelling;
	const behind = [...tower.stored.tensors.keys()].filter(
		behindTap(tower.json, tower.tower!.spelling, tower.configPath),
	);
	const inner = spelling.base.slice(spelling.head.length);
	return {
		configText: formatPythonJson(llavaJson({ ...parts, rows: tower.tower!.configuration.positions })),
		spelling: {
			language: { ...spelling, base: `language_model.${inner}`, head: "language_model." },
			tower: { ...tower.tower!.spelling, prefix: "vision_tower." },
			projector: "transformers",
		},
		leftOut: renamedTensors(
			tower.stored,
			new Map(behind.map((name) => [name, `vision_tower.${name.slice(prefix.length)}`])),
		),
		companions: withVision(main.companions, tower.path),
	};
}

/** A folder's config.json, to be written again. */
function jsonOf({ configText, configPath }: FolderParts): Readonly<Record<string, unknown>> {
	return parseKeepingFloats(configText ?? "{}", configPath);
}

/** The language model's files, and the preprocessor of the tower. */
function withVision(language: Companions, tower: string): Companions {
	return new Map([...language, ...preprocessorOf(tower)]);
}

/** Some tensors of a store under other names. */
function renamedTensors(store: TensorStore, names: ReadonlyMap<string, string>): TensorStore {
	const origin = new Map([...names].map(([from, to]) => [to, from]));
	return {
		path: store.path,
		tensors: new Map([...names].map(([from, to]) => [to, store.tensors.get(from)!])),
		readInto: (name, offset, into) => store.readInto(origin.get(name)!, offset, into),
		[Symbol.dispose]: () => {},
	};
}
