/** The families that this program reads and writes, chosen by config.json's model_type, by tensor names, or by the model. */

import { UserError } from "../../../system/errors.ts";
import { type Correspondence, CorrespondenceBuilder } from "../../mapping.ts";
import { deepseekV3 } from "./deepseek-v3.ts";
import type { Family, Json, LanguageModelConfiguration, NameOptions, Spelling } from "./family.ts";
import { gemma3 } from "./gemma3.ts";
import { glm4Moe, glm4vMoeText } from "./glm4-moe.ts";
import { gptOss } from "./gpt-oss.ts";
import { llama } from "./llama.ts";
import { mistral } from "./mistral.ts";
import { nemotronH } from "./nemotron-h.ts";
import { type SpellingName, spellings } from "./nemotron-h-names.ts";
import { qwen2, qwen25VlText } from "./qwen2.ts";
import { qwen3, qwen3Moe, qwen3VlMoeText, qwen3VlText } from "./qwen3.ts";
import { qwen3Next, qwen35MoeText, qwen35Text } from "./qwen3-next.ts";

const families: readonly Family[] = [
	...[nemotronH, glm4vMoeText, glm4Moe, llama, mistral, qwen25VlText, qwen2],
	...[qwen3VlText, qwen3VlMoeText, qwen3, qwen3Moe, gptOss, gemma3],
	...[qwen3Next, qwen35Text, qwen35MoeText, deepseekV3],
];

/** model_type of every family, for messages. */
export const modelTypes = families.map(({ modelType }) => modelType);

/** The family of a config.json's model_type; null: none of these. */
export function familyOfType(type: unknown): Family | null {
	return families.find(({ modelType }) => modelType === type) ?? null;
}

/** The family of a folder's tensor names. */
export function familyOf({ family }: Spelling): Family {
	return familyOfType(family ?? nemotronH.modelType)!;
}

/** The family that a model which comes from no folder is written as. */
export function familyFor(configuration: LanguageModelConfiguration): Family {
	return families.find(({ describes }) => describes(configuration)) ?? nemotronH;
}

/** config.json with this many depths of multi-token prediction, where that is for tensors to say. */
export function withDepths(json: Json, depths: number): Json {
	const { ahead } = familyOfType(json.model_type) ?? {};
	return ahead === undefined ? json : { ...json, [ahead.field]: depths };
}

/** Reads config.json of any of the families; `path` is for errors. */
export function configurationFromHuggingFace(json: Json, path: string): LanguageModelConfiguration {
	const family = familyOfType(json.model_type);
	if (family !== null) return family.read(json, path);
	throw new UserError(
		`${path}: model_type is ${JSON.stringify(json.model_type)}; ${modelTypes.map((type) => `"${type}"`).join(", ")} can be read.`,
	);
}

/** A config.json for a model that comes from no folder; throws a UserError for a model that its family's class is not. */
export function configurationToHuggingFace(
	configuration: LanguageModelConfiguration,
	dtype: string,
	path: string,
): Record<string, unknown> {
	return familyFor(configuration).write(configuration, dtype, path);
}

/**
 * The spelling of a model that comes from no folder. `names`: as the user asks for, of NemotronH alone; null: the family's own. `type`:
 * model_type of the config.json that it gets; null: one is made for it.
 */
export function spellingFor(
	configuration: LanguageModelConfiguration,
	names: SpellingName | null,
	type: unknown = null,
): Spelling {
	const family = familyOfType(type) ?? familyFor(configuration);
	if (names === null) return family.spelling;
	if (family === nemotronH) return spellings[names];
	throw new UserError(
		`--hf-names ${names} is of NemotronH, and the model is of ${family.title}, whose names are one kind.`,
	);
}

/** The spelling of a folder's tensor names, or null where no language model is among them. */
export function detectSpelling(names: Iterable<string>, type: unknown = null): Spelling | null {
	const all = [...names];
	const own = familyOfType(type)?.detect(all) ?? null;
	if (own !== null) return own;
	for (const { detect } of families) {
		const spelling = detect(all);
		if (spelling !== null) return spelling;
	}
	return null;
}

/** Adds a language model's tensors, of both formats, to those of other modules in `builder`. */
export function addLanguage(
	builder: CorrespondenceBuilder,
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	options: NameOptions = {},
): void {
	familyOf(spelling).addNames(builder, configuration, spelling, options);
}

export function languageCorrespondence(
	configuration: LanguageModelConfiguration,
	spelling: Spelling,
	path: string,
	options: NameOptions = {},
): Correspondence {
	const builder = new CorrespondenceBuilder(path);
	addLanguage(builder, configuration, spelling, options);
	return builder;
}
