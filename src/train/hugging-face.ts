/** Starting from, and leaving behind, a Hugging Face NemotronH folder (--load-hf, --save-hf). */
import type { LanguageModelConfiguration } from "../checkpoint/hf/configuration.ts";
import { spellings } from "../checkpoint/hf/language-names.ts";
import { openHuggingFaceModel, saveHuggingFaceModel } from "../checkpoint/hf/model.ts";
import { loadModel, ValueStore } from "../checkpoint/model-store.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { UserError } from "../native/errors.ts";

/** What a folder written later keeps of the one the weights came from. */
export interface Origin {
	readonly configText: string;
	readonly spelling: (typeof spellings)[keyof typeof spellings];
}

/** Keys in which a folder's config.json must agree with the configuration. */
const decisive = [
	"hybridLayerPattern",
	"hiddenSize",
	"ffnHiddenSize",
	"numAttentionHeads",
	"numQueryGroups",
	"kvChannels",
	"vocabSize",
	"normEpsilon",
	"mambaNumHeads",
	"mambaHeadDim",
	"mambaNumGroups",
	"mambaStateDim",
	"mambaConvKernelDim",
	"numExperts",
	"moeRouterTopk",
	"moeFfnHiddenSize",
	"moeSharedExpertIntermediateSize",
	"moeRouterTopkScalingFactor",
] as const satisfies (keyof LanguageModelConfiguration & keyof TrainingConfiguration)[];

/** Initial values: from --load-hf, or drawn from the seed. `partial`: this rank holds a part of the model. */
export function loadWeights(model: HybridModel, c: TrainingConfiguration, partial: boolean): Origin | null {
	if (c.loadHf === null) {
		model.initialise(c.seed);
		return null;
	}
	using source = openHuggingFaceModel(c.loadHf);
	const different = decisive.filter((key) => source.configuration[key] !== c[key]);
	if (different.length > 0) {
		const list = different.map((key) => `${key} is ${source.configuration[key]} there and ${c[key]} here`).join("; ");
		throw new UserError(`${c.loadHf} holds another model: ${list}.`);
	}
	loadModel(model, source.weights, partial);
	return { configText: source.configText, spelling: source.spelling as Origin["spelling"] };
}

/** Writes the trained weights to --save-hf, under the names and config.json they came with. */
export async function saveWeights(model: HybridModel, c: TrainingConfiguration, origin: Origin | null): Promise<void> {
	if (c.saveHf === null) return;
	using weights = new ValueStore(c.saveHf, model);
	await saveHuggingFaceModel(c.saveHf, weights, languageKeys(c), {
		spelling: origin?.spelling ?? spellings.published,
		replace: true,
		...(origin ? { configText: origin.configText } : {}),
	});
}

function languageKeys(c: TrainingConfiguration): LanguageModelConfiguration {
	return { ...c, moeRouterScoreFunction: c.moeRouterScoreFunction as "sigmoid" | "softmax" };
}
