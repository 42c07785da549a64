/**
 * The keys of a training configuration that Hugging Face folders decide (--load-hf, --load-vision, --load-projector,
 * --load-peft): those that make the model as their config.json and tensors say them, and defaults that fit it.
 */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { toldKeys } from "../../config/language-model.ts";
import { describedKeys, modelPartOf } from "../../config/same-model.ts";
import { fieldOf, type Key, propertyOf } from "../../config/schema.ts";
import type { FolderReader, FolderValue } from "../../config/sources.ts";
import { adaptedWeight, targetOf } from "../../models/lora.ts";
import { readJsonText, tokenizerLimits } from "../../system/json.ts";
import { adapterConfigName, openPeftFolder, readAdapterSettings } from "../lora/peft-folder.ts";
import { folderTexts, readImageProcessor } from "./image-processor.ts";
import type { FolderParts } from "./parts.ts";
import { openPretrained, type Pretrained, type PretrainedPaths } from "./pretrained.ts";
import { towerConfig } from "./vision-configuration.ts";
import { isTowerType } from "./vision-towers.ts";

/** Reads config.json and the names and shapes of tensors; throws a UserError where folders do not fit together. */
export const readModelKeys: FolderReader = (given) => {
	const path = (key: Key) => {
		const value = given(key);
		return typeof value === "string" && value !== "" ? value : null;
	};
	const paths: PretrainedPaths = {
		loadHf: path("load-hf"),
		loadVision: path("load-vision"),
		loadProjector: path("load-projector"),
		mtpNumLayers: given("mtp-num-layers") === 0 ? 0 : undefined,
	};
	const heads = given("vision-num-attention-heads");
	using pretrained = openPretrained(paths, Number.isSafeInteger(heads) ? (heads as number) : null);
	const adapters = path("load-peft");
	return [
		...(pretrained === null ? [] : [...fixedValues(pretrained, given), ...defaults(pretrained, given)]),
		...(adapters === null ? [] : adapterValues(adapters, pretrained)),
	];
};

/** Rank, α and, where the base is known, the modules that have adapters. */
function adapterValues(folder: string, base: Pretrained | null): FolderValue[] {
	const { rank, alpha, dropout } = readAdapterSettings(folder);
	const from = join(folder, adapterConfigName);
	const modules = base?.language ? adaptedModules(folder, base) : null;
	return [
		...(modules === null ? [] : [{ key: "lora-target-modules" as Key, value: modules, from, fixed: false }]),
		{ key: "lora-rank", value: rank, from, fixed: true },
		{ key: "lora-alpha", value: alpha, from, fixed: true },
		{ key: "lora-dropout", value: dropout, from, fixed: false },
	];
}

function adaptedModules(folder: string, { language, tower, projector }: Pretrained): string[] {
	const sizes = tower?.tower && { tower: tower.tower.configuration, projector: projector?.projector?.sizes ?? null };
	using adapters = openPeftFolder(folder, { ...language!.language!.configuration, vision: sizes ?? null });
	const modules = [...adapters.weights.tensors.keys()].map((name) => targetOf(adaptedWeight(name)));
	return [...new Set(modules)].filter((module) => module !== null);
}

function fixedValues({ descriptions, tower }: Pretrained, given: Parameters<FolderReader>[0]): FolderValue[] {
	const withTower = { key: "model-provider" as Key, value: "nemotron-moe-vlm" };
	const provider = tower === null ? [] : [{ ...withTower, from: tower.configPath, fixed: true }];
	// All folders together say which parts the model has.
	const whole = Object.assign({}, ...descriptions.map(({ keys }) => keys), {
		modelProvider: provider[0]?.value ?? given("model-provider") ?? "hybrid",
		llmOnly: given("llm-only") === true,
	});
	const values = descriptions.flatMap(({ from, keys }) => {
		const own = describedKeys(whole).filter(({ key }) => propertyOf(key) in keys);
		const token = keys.imageTokenId;
		const more = typeof token === "number" ? [{ key: "image-token-id" as Key, value: token }] : [];
		return [...own, ...more].map((entry) => ({ ...entry, from, fixed: true }));
	});
	return [...provider, ...values];
}

/** Keys on which no tensor depends, with the folder's values; the user's values take precedence. */
function defaults({ language, tower, projector }: Pretrained, given: Parameters<FolderReader>[0]): FolderValue[] {
	const values: FolderValue[] = [];
	const add = (from: string, more: Partial<Record<Key, unknown>>) => {
		for (const [key, value] of Object.entries(more)) {
			if (value !== undefined && value !== null) values.push({ key: key as Key, value, from, fixed: false });
		}
	};
	if (language) {
		const { configuration: c } = language.language!;
		add(language.configPath, {
			...Object.fromEntries(
				toldKeys
					.filter((key) => modelPartOf(key) === null && key !== "num-layers")
					.map((key) => [key, c[propertyOf(key) as keyof typeof c]]),
			),
			"seq-length": Math.min(fieldOf("seq-length").default as number, c.maxPositionEmbeddings),
		});
		if (existsSync(join(language.path, "tokenizer.json"))) add(language.path, { tokenizer: language.path });
	}
	if (tower === null) return values;
	if (language) {
		const added = addedTokensOf(language.path);
		if (language.imageTokenId === null) add(language.path, { "image-token-id": added.get("<image>") });
		// transformers' processors of Nemotron's and InternVL's models write them around every image, others none.
		const type = towerConfig(tower.json).model_type;
		const tagged = !isTowerType(type) || type === "internvl_vision";
		if (tagged && added.has("<img>") && added.has("</img>")) add(language.path, { "image-tag-type": "internvl" });
	}
	if (projector === null && isTowerType(towerConfig(tower.json).model_type)) {
		// LLaVA's, whose inner width is the language model's.
		add(tower.configPath, {
			...{ "vision-projection-type": "mlp", "vision-projection-activation": "gelu", "vision-projection-bias": true },
			...{ "disable-vision-class-token": true },
			"vision-projection-ffn-hidden-size": language?.language?.configuration.hiddenSize,
		});
	} else if (projector === null) {
		// The shape of published models, which a Hugging Face folder has a place for.
		add(tower.configPath, {
			"vision-projection-type": "mlp",
			"vision-projection-norm": true,
			"pixel-shuffle": true,
			"disable-vision-class-token": true,
		});
	}
	return [...values, ...imageDefaults(tower, given)];
}

/**
 * Sizes and normalisation of images as the tower's folder says them. Where images of another kind are asked for, theirs; where no
 * file says a limit of patches and dynamic-resolution is asked for, the key's own default.
 */
function imageDefaults(tower: FolderParts, given: Parameters<FolderReader>[0]): FolderValue[] {
	const { kind, keys } = readImageProcessor(folderTexts(tower));
	const asked = (key: Key) => given(key) !== undefined && given(key) !== false;
	const others: readonly Key[] = kind === "tiles" ? ["dynamic-resolution"] : ["use-tiling", "img-h", "img-w"];
	const kinds: readonly string[] = others.some(asked) ? ["use-tiling", "dynamic-resolution"] : [];
	return Object.entries(keys)
		.filter(([key, { from }]) => !kinds.includes(key) && (from !== null || !asked("dynamic-resolution")))
		.map(([key, { value, from }]) => ({ key: key as Key, value, from: from ?? tower.configPath, fixed: false }));
}

/** Ids of the added tokens of a folder's tokenizer, by their text. */
function addedTokensOf(folder: string): ReadonlyMap<string, number> {
	const path = join(folder, "tokenizer.json");
	if (!existsSync(path)) return new Map();
	try {
		const { added_tokens: added } = JSON.parse(readJsonText(path, tokenizerLimits, { inside: folder }));
		return new Map(added.map(({ content, id }: { content: string; id: number }) => [content, id]));
	} catch {
		// Said by name where the tokenizer is opened.
		return new Map();
	}
}
