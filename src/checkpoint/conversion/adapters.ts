/** Low-rank adapters in conversions: merged into their weights, kept in native checkpoints, or written for PEFT. */
import { isAdapterName } from "../../models/lora.ts";
import { UserError } from "../../system/errors.ts";
import type { Durability } from "../files.ts";
import type { SpellingName } from "../hf/families/nemotron-h-names.ts";
import { configObject } from "../hf/kept-folder.ts";
import { visionOfLogical } from "../hf/vision-configuration.ts";
import { towerPrefix } from "../hf/vision-names.ts";
import { MergedStore, scaleOf } from "../lora/adapters.ts";
import { type AdapterSettings, openPeftFolder, type PlannedAdapters, planPeftFolder } from "../lora/peft-folder.ts";
import { type AdaptedModel, moduleSpelling, storedSpelling } from "../lora/peft-names.ts";
import { joinStores, selectTensors, type TensorStore } from "../store.ts";
import { spellingIn } from "./hugging-face.ts";
import type { FormatName, SourceCheckpoint } from "./source.ts";

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
	return planPeftFolder(adapters, settingsOf(source), model, { spelling: chosen, base: null, path, sync });
}
