/**
 * The image processor of a Hugging Face folder: sizes and normalisation of images in the program's keys, read and written. Its
 * settings are in preprocessor_config.json, or in processor_config.json under `image_processor`, which transformers prefers; some of
 * them are in config.json too, where vLLM reads them.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { lackingOfProcessor, type ProcessorKind } from "../../config/published-model.ts";
import { type Key, propertyOf, type TrainingConfiguration } from "../../config/schema.ts";
import { clipStatistics } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";
import { configLimits, readJsonText } from "../../system/json.ts";
import type { Companions } from "./companions.ts";
import { formatPythonJson, parseKeepingFloats, parsePythonJson, pythonFloat } from "./json.ts";
import type { FolderParts } from "./parts.ts";
import { towerConfig } from "./vision-configuration.ts";

type Json = Readonly<Record<string, unknown>>;

/** Names of the keys that each kind of processor has. */
const names = {
	dynamic: {
		"dynamic-resolution-min-patches": "min_num_patches",
		"dynamic-resolution-max-patches": "max_num_patches",
	},
	tiles: { "img-h": "image_size", "max-num-tiles": "max_num_tiles", "use-thumbnail": "use_thumbnail" },
} as const satisfies Record<ProcessorKind, Partial<Record<Key, string>>>;

/** Classes and their defaults: transformers 5.23's NemotronH_Omni, and the code that NemotronH_Nano_VL_V2 is published with. */
const classes = {
	dynamic: {
		image_processor_type: "NemotronH_Omni_Reasoning_V3ImageProcessor",
		defaults: { min_num_patches: 1024, max_num_patches: 13312 },
	},
	tiles: {
		image_processor_type: "NemotronNanoVLV2ImageProcessor",
		defaults: { image_size: 512, max_num_tiles: 12, use_thumbnail: true },
	},
} as const;

/** RadioConfig's image_size in transformers. */
const RADIO_IMAGE_SIZE = 224;

/** A value, and the file that says it; null: none does. */
interface Said {
	readonly value: unknown;
	readonly from: string | null;
}

export interface ImageProcessor {
	/** null: of a class whose files are taken as they are. */
	readonly kind: ProcessorKind | null;
	/** Keys of its images, and the side in pixels of images that have one size. */
	readonly keys: Readonly<Partial<Record<Key, Said>>>;
	/** Tokens of the context, which limit the patches of an image; null: unknown. */
	readonly contextLength: number | null;
}

/** The known parts of a folder: its path, its config.json, and the text of its files, null for a file that is absent. */
export interface FolderTexts {
	readonly path: string;
	readonly configText: string;
	readonly textOf: (name: string) => string | null;
}

/** Texts of an open folder. */
export function folderTexts({ path, configText }: Pick<FolderParts, "path" | "configText">): FolderTexts {
	const textOf = (name: string) => {
		const file = join(path, name);
		return existsSync(file) ? readJsonText(file, configLimits, { inside: path }) : null;
	};
	return { path, configText: configText ?? "{}", textOf };
}

/** Reads the processor of a folder with a tower. Throws a UserError for a file that is no JSON object. */
export function readImageProcessor(folder: FolderTexts): ImageProcessor {
	const configPath = `${folder.path}/config.json`;
	const config = parsePythonJson(folder.configText, configPath);
	const section = towerConfig(config);
	const args = objectOf(section.args);
	const found = settingsIn(folder, parsePythonJson);
	const own = found?.settings ?? {};
	if (found !== null && found.read !== null) {
		const from = `${folder.path}/${found.name}`;
		const keys = Object.entries(found.read(own, config)).map(([key, value]) => [key, { value, from }] as const);
		return { kind: null, keys: Object.fromEntries(keys), contextLength: null };
	}
	const file = found === null ? configPath : `${folder.path}/${found.name}`;
	const places = [own, config, args, section].map((json) => ({ json, from: json === own ? file : configPath }));
	/** The first value of these names: of the processor, the whole model, the tower. */
	const said = (...spelled: readonly string[]): Said | undefined =>
		places
			.flatMap(({ json, from }) => spelled.map((name) => ({ value: json[name], from })))
			.find(({ value }) => value !== undefined && value !== null);
	const isTiled = /Nano_VL_V2/.test(`${config.model_type} ${config.architectures}`) && !said("min_num_patches");
	const kind = isTiled ? "tiles" : "dynamic";
	const side = sideOf(own, config, section);
	const sides = { value: side, from: "image_size" in own ? file : configPath };
	// Where nothing says the sizes of images, they have no more patches than the tower's own.
	const most = Math.floor(side / (countOf([section.patch_size].flat()[0]) || 16)) ** 2;
	const towers: Json = { min_num_patches: 4, max_num_patches: most };
	const [unsaid, from] = found === null && !isTiled ? [towers, null] : [classes[kind].defaults as Json, file];
	const sizes = Object.entries(names[kind]).map(([key, name]) => [key, said(name) ?? { value: unsaid[name], from }]);
	const [mean, deviation] = [said("image_mean", "norm_mean"), said("image_std", "norm_std")];
	return {
		kind,
		keys: {
			...Object.fromEntries(sizes),
			"img-h": sides,
			"img-w": sides,
			...(mean && { "image-mean": mean }),
			...(deviation && { "image-std": deviation }),
			[isTiled ? "use-tiling" : "dynamic-resolution"]: { value: true, from: file },
		},
		contextLength: countOf(own.max_model_len),
	};
}

/** Side in pixels of images of one size, or of tiles. */
function sideOf(own: Json, config: Json, section: Json): number {
	const said = [own.image_size, config.force_image_size, section.image_size, section.preferred_resolution];
	return said.map((value) => countOf([value].flat()[0])).find((side) => side) ?? RADIO_IMAGE_SIZE;
}

const isGiven = (value: unknown) => value !== undefined && value !== null;
const objectOf = (value: unknown) => (typeof value === "object" && value !== null ? value : {}) as Json;
const countOf = (value: unknown) => (Number.isSafeInteger(value) && (value as number) >= 0 ? (value as number) : null);

interface Settings {
	/** Name and content of their file. */
	readonly name: string;
	readonly json: Json;
	readonly settings: Json;
	/** The keys that settings of another class than Nemotron's have; null: they are Nemotron's. */
	readonly read: ((settings: Json, config: Json) => Partial<Record<Key, unknown>>) | null;
}

/** Sides of images in pixels, and their normalisation. */
const normalised = ({ image_mean: mean, image_std: deviation }: Json): Partial<Record<Key, unknown>> => ({
	...{ "image-mean": mean, "image-std": deviation, "image-resampling": "torchvision" },
});
const sized = (settings: Json): Partial<Record<Key, unknown>> => {
	const { height, width } = objectOf(settings.size);
	return { ...normalised(settings), "img-h": height, "img-w": width };
};

/** transformers' sizes where no file has any: all of 1 to 6 tiles of 384 pixels a side. */
const tileSides = Array.from({ length: 6 }, (_, tile) => 384 * (tile + 1));
const allSizes = tileSides.flatMap((height) => tileSides.map((width) => [height, width]));

/** The sizes of LLaVA-OneVision's images, which config.json has too. Throws a UserError where both differ. */
function pinpointsOf({ image_grid_pinpoints: own = allSizes }: Json, config: Json): unknown {
	const models = config.image_grid_pinpoints ?? allSizes;
	if (!Bun.deepEquals(own, models)) {
		throw new UserError(
			"image_grid_pinpoints of the image processor differs from that of config.json, by which the model counts a picture's rows.",
		);
	}
	const isSize = (size: unknown) => Array.isArray(size) && size.length === 2 && size.every(countOf);
	return Array.isArray(own) && own.every(isSize) ? own.map((size) => size.join("x")) : own;
}

/** Of vision_aspect_ratio, such as anyres_max_9. */
function mostTiles({ vision_aspect_ratio: said = "anyres_max_9" }: Json): number {
	const most = /^anyres_max_(\d+)$/.exec(String(said))?.[1];
	if (most !== undefined && Number(most) > 0) return Number(most);
	throw new UserError(
		`vision_aspect_ratio is ${JSON.stringify(said)} in config.json, expected one such as "anyres_max_9".`,
	);
}

/** Areas are of all frames of a patch, and images are as wide and high as a row's block at least. */
function ofGlm(settings: Json): Partial<Record<Key, unknown>> {
	const frames = Number(settings.temporal_patch_size ?? 2);
	const { shortest_edge: least = 112 * 112, longest_edge: most = 28 * 28 * 15000 } = objectOf(settings.size);
	return {
		...normalised({ image_mean: clipStatistics.mean, image_std: clipStatistics.deviation, ...settings }),
		...{ "min-pixels": Number(least) / frames, "max-pixels": Number(most) / frames, "dynamic-resolution": true },
		"dynamic-resolution-min-side": Number(settings.patch_size ?? 14) * Number(settings.merge_size ?? 2),
	};
}

/** Classes of transformers' processors of other models. */
const others: Readonly<Record<string, NonNullable<Settings["read"]>>> = {
	SiglipImageProcessor: sized,
	LlavaOnevisionImageProcessor: (settings, config) => ({
		...sized(settings),
		"image-mean": settings.image_mean ?? clipStatistics.mean,
		"image-std": settings.image_std ?? clipStatistics.deviation,
		"image-grid-pinpoints": pinpointsOf(settings, config),
		"max-anyres-tiles": mostTiles(config),
	}),
	// Areas in pixels, whatever they are called.
	Qwen2VLImageProcessor: (settings) => {
		const { shortest_edge: least, longest_edge: most } = objectOf(settings.size);
		const limits = { "min-pixels": settings.min_pixels ?? least, "max-pixels": settings.max_pixels ?? most };
		return { ...normalised(settings), ...limits, "dynamic-resolution": true };
	},
	Glm4vImageProcessor: ofGlm,
	Glm46VImageProcessor: ofGlm,
	// InternVL's processor cuts images into tiles whatever crop_to_patches says.
	GotOcr2ImageProcessor: (settings) => ({
		...sized(settings),
		...{ "use-tiling": true, "use-thumbnail": true },
		...{ "min-num-tiles": settings.min_patches ?? 1, "max-num-tiles": settings.max_patches ?? 12 },
	}),
};

/** The settings of a processor of these models; null: the folder has none, or one of another class, such as a tower's own. */
function settingsIn({ path, textOf }: FolderTexts, parse: (text: string, path: string) => Json): Settings | null {
	for (const name of ["processor_config.json", "preprocessor_config.json"]) {
		const text = textOf(name);
		if (text === null) continue;
		const json = parse(text, `${path}/${name}`);
		if (name === "processor_config.json" && !isGiven(json.image_processor)) continue;
		const settings = name === "processor_config.json" ? objectOf(json.image_processor) : json;
		const type = String(settings.image_processor_type ?? settings.feature_extractor_type ?? "Nemotron");
		const read = others[type.replace(/Fast$/, "")] ?? null;
		return read !== null || type.startsWith("Nemotron") ? { name, json, settings, read } : null;
	}
	return null;
}

/** Files of a folder that say how images are resized and normalised. */
export interface ImageFiles {
	readonly configText: string;
	readonly companions: Companions;
}

/** Whether a description says how images are resized. */
const isKnown = ({ dynamicResolution, useTiling }: Partial<TrainingConfiguration>) =>
	dynamicResolution !== undefined || useTiling !== undefined;

/**
 * A clause that names what images of a training, `described` by the program's keys, lack to be said by the processor of a folder;
 * null: nothing.
 */
export function lackingOfImages(
	files: ImageFiles,
	described: Partial<TrainingConfiguration>,
	path: string,
): string | null {
	const { configText, companions } = files;
	const { kind } = readImageProcessor({ path, configText, textOf: textsOf(companions) });
	return isKnown(described) && kind !== null ? lackingOfProcessor(described, kind) : null;
}

/**
 * The files of a folder whose processor has the settings of a trained model. They keep every byte where they say so already, and
 * where the settings are unknown; a folder without a processor gets one.
 */
export function writeImageProcessor(
	{ configText, companions }: ImageFiles,
	described: Partial<TrainingConfiguration>,
	{ patchSize, path }: { readonly patchSize: number; readonly path: string },
): ImageFiles {
	const folder = { path, configText, textOf: textsOf(companions) };
	const { kind, keys, contextLength } = readImageProcessor(folder);
	if (kind === null) {
		requireSame(keys, described, path);
		return { configText, companions };
	}
	const found = settingsIn(folder, parseKeepingFloats);
	const known = isKnown(described);
	const statistics = { "image-mean": clipStatistics.mean, "image-std": clipStatistics.deviation };
	const trained = (key: Key) =>
		(known ? described[propertyOf(key)] : keys[key]?.value) ?? statistics[key as keyof typeof statistics];
	const compared = [...(Object.keys(names[kind]) as Key[]), ...(Object.keys(statistics) as Key[])];
	const there = (key: Key) => keys[key]?.value ?? statistics[key as keyof typeof statistics];
	const length = kind === "dynamic" ? (described.seqLength ?? contextLength) : contextLength;
	const same = length === contextLength && compared.every((key) => Bun.deepEquals(trained(key), there(key)));
	if (found !== null && same) return { configText, companions };
	const sizes = Object.fromEntries(Object.entries(names[kind]).map(([key, name]) => [name, trained(key as Key)]));
	const [mean, deviation] = (["image-mean", "image-std"] as const).map((key) =>
		(trained(key) as number[]).map(pythonFloat),
	);
	const own = found?.settings ?? {
		...{ image_processor_type: classes[kind].image_processor_type, patch_size: patchSize, downsample_ratio: 0.5 },
		...(kind === "tiles" ? { norm_mean: null } : {}),
	};
	const spelled = "norm_mean" in own && !("image_mean" in own) ? "norm" : "image";
	const settings = {
		...own,
		...{ [`${spelled}_mean`]: mean, [`${spelled}_std`]: deviation },
		...(known ? sizes : {}),
		...(length === null ? {} : { max_model_len: length }),
	};
	const name = found?.name ?? "preprocessor_config.json";
	const file = name === "processor_config.json" ? { ...found!.json, image_processor: settings } : settings;
	const config = parseKeepingFloats(configText, `${path}/config.json`);
	const changed = withImages(config, {
		...{ ...sizes, norm_mean: mean, norm_std: deviation },
		...(kind === "tiles" ? { force_image_size: trained("img-h") } : {}),
	});
	return {
		configText: Bun.deepEquals(changed, config) ? configText : formatPythonJson(changed),
		companions: new Map([...companions, [name, new TextEncoder().encode(formatPythonJson(file))]]),
	};
}

/** Throws a UserError for a setting of images that the training had otherwise. */
function requireSame(keys: ImageProcessor["keys"], described: Partial<TrainingConfiguration>, path: string): void {
	for (const [key, said] of Object.entries(keys) as [Key, Said][]) {
		const trained = described[propertyOf(key)];
		if (trained === undefined || Bun.deepEquals(trained, said.value)) continue;
		throw new UserError(
			`${path}: ${key} was ${JSON.stringify(trained)} in training and ${said.from} says ${JSON.stringify(said.value)}; --hf-reference names a folder whose processor is taken as it is.`,
		);
	}
}

/** The text of a folder's files in memory. */
function textsOf(companions: Companions): FolderTexts["textOf"] {
	return (name) => {
		const bytes = companions.get(name);
		return bytes === undefined ? null : new TextDecoder().decode(bytes);
	};
}

/** A config.json with other values where it has them already; the tower's own normalisation stays, which its weights go by. */
function withImages(config: Json, values: Json): Json {
	const { norm_mean: _, norm_std: __, ...sizes } = values;
	const replaced = (place: Json, by: Json) =>
		Object.fromEntries(Object.entries(place).map(([name, value]) => [name, name in by ? by[name] : value]));
	const section = config.vision_config;
	if (typeof section !== "object" || section === null) return replaced(config, values);
	const { args } = section as Json;
	const inner = typeof args === "object" && args !== null ? { args: replaced(args as Json, sizes) } : {};
	return { ...replaced(config, values), vision_config: { ...replaced(section as Json, sizes), ...inner } };
}
