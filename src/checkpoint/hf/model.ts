/**
 * A language model's weights in a Hugging Face folder under Megatron's logical names (docs/spec/checkpoint.md §4, docs/spec/language-model.md §10). Strict:
 * every missing, unexpected and mis-shaped tensor is named.
 */

import { UserError } from "../../system/errors.ts";
import type { TensorStore } from "../store.ts";
import type { LanguageModelConfiguration } from "./configuration.ts";
import type { Spelling } from "./families/family.ts";
import { openParts } from "./parts.ts";

export interface HuggingFaceModel extends Disposable {
	readonly configuration: LanguageModelConfiguration;
	readonly spelling: Spelling;
	/** config.json as it stands in the folder. */
	readonly configText: string;
	/** Tensors under logical names; reads one at a time from the folder. */
	readonly weights: TensorStore;
}

/** Opens the folder of a language model alone and checks names and shapes; no weights are read yet. */
export function openHuggingFaceModel(path: string): HuggingFaceModel {
	const parts = openParts(path, { visionHeads: null });
	const { language, tower, projector, configText, weights } = parts;
	if (language === null || tower !== null || projector !== null) {
		parts[Symbol.dispose]();
		throw new UserError(`${path} is not of a language model alone.`);
	}
	return { ...language, configText: configText ?? "{}", weights, [Symbol.dispose]: () => parts[Symbol.dispose]() };
}
