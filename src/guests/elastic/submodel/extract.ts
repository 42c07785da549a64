/** A submodel as a checkpoint of its own: slices of the parent's tensors, and a description of what they are. */

import {
	type ConversionOptions,
	configObject,
	configurationToHuggingFace,
	formatPythonJson,
	isKeptObject,
	type JsonObject,
	type LanguageModelConfiguration,
	languageKey,
	openSource,
	type PlannedConversion,
	parseKeepingFloats,
	planConversion,
	SelectedStore,
	type SourceCheckpoint,
	selectTensors,
} from "../../../checkpoint/index.ts";
import { elasticKeys } from "../../../config/keys/elastic.ts";
import { type Key, propertyOf } from "../../../config/schema.ts";
import type { HybridConfig } from "../../../models/language/config.ts";
import { describedConfig } from "../../../models/language/from-configuration.ts";
import { isAdapterName } from "../../../models/lora.ts";
import { UserError } from "../../../system/errors.ts";
import { submodelKeys, unitsOfSubmodel } from "./configuration.ts";
import type { Submodel } from "./submodel.ts";
import { selectionsOf } from "./units.ts";

/** The model that a checkpoint says it holds. Throws a UserError where it says none, or holds adapters beside it. */
export function parentOf({ path, configuration, weights }: SourceCheckpoint): {
	readonly configuration: LanguageModelConfiguration;
	readonly config: HybridConfig;
} {
	if (configuration === null) throw new UserError(`${path} does not say what model it holds.`);
	if ([...weights.tensors.keys()].some(isAdapterName)) {
		throw new UserError(
			`${path} has low-rank adapters; \`mimo convert-ckpt --adapters\` or a Hugging Face target merges them first.`,
		);
	}
	return { configuration, config: describedConfig(configuration, { bf16: false }) };
}

/** A checkpoint's submodel, which reads from it and owns it. The router and the optimizer's state are left out. */
function submodelSource(source: SourceCheckpoint, submodel: Submodel): SourceCheckpoint {
	const { configuration } = parentOf(source);
	const keys = submodelKeys(configuration, submodel);
	const own: LanguageModelConfiguration = { ...configuration, ...keys };
	const model = selectTensors(source.weights, (name) => !isTrainingOnlyLoss(name));
	const weights = new SelectedStore(
		model,
		selectionsOf(model, configuration, unitsOfSubmodel(configuration, submodel)),
	);
	return {
		...source,
		weights,
		stored: weights,
		configuration: own,
		model: { ...withoutRouter(source.model), ...(keys as unknown as JsonObject) },
		iteration: null,
		common: {},
		objects: keptObjects(source, own),
		[Symbol.dispose]: () => source[Symbol.dispose](),
	};
}

/** The submodel is no parent: its description has no axes and no budgets. */
function withoutRouter(model: JsonObject): JsonObject {
	const own = new Set<string>(Object.keys(elasticKeys).map((key) => propertyOf(key as Key)));
	return Object.fromEntries(Object.entries(model).filter(([key]) => !own.has(key)));
}

const isTrainingOnlyLoss = (name: string) => /^(optimizer|elastic_router)\./.test(name);

/** The Hugging Face folder's files that the parent came with; its config.json says the submodel's sizes. */
function keptObjects(source: SourceCheckpoint, own: LanguageModelConfiguration): SourceCheckpoint["objects"] {
	const kept = new Map([...source.objects].filter(([name]) => isKeptObject(name)));
	const config = kept.get(configObject);
	if (config === undefined) return kept;
	const where = `config.json of ${source.path}`;
	const json = parseKeepingFloats(new TextDecoder().decode(config.bytes), where);
	const key = languageKey(json);
	const { torch_dtype: _, ...fresh } = configurationToHuggingFace(own, "float32", where);
	const old = (key === null ? json : json[key]) as Readonly<Record<string, unknown>>;
	const { block_configs: __, ...rest } = old;
	const text = { ...rest, ...Object.fromEntries(Object.entries(fresh).filter(([name]) => sized.has(name))) };
	const bytes = new TextEncoder().encode(formatPythonJson(key === null ? text : { ...json, [key]: text }));
	return kept.set(configObject, { ...config, bytes });
}

/** Fields of config.json that a submodel has otherwise than its parent. */
const sized = new Set([
	"hidden_size",
	"num_hidden_layers",
	"hybrid_override_pattern",
	"layers_block_type",
	"num_attention_heads",
	"mamba_num_heads",
	"n_routed_experts",
	"moe_intermediate_size",
	"block_configs",
]);

export interface Extraction extends PlannedConversion {
	readonly submodel: Submodel;
	readonly parent: LanguageModelConfiguration;
	readonly child: LanguageModelConfiguration;
	/** Whether the checkpoint has optimizer state, which no submodel gets. */
	readonly dropsOptimizer: boolean;
}

/**
 * Opens the checkpoint and plans the submodel's; nothing is written. `choose`: from the parent to its submodel. Throws a UserError for a
 * checkpoint that holds no language model, or for tensors that do not fit it.
 */
export function planExtraction(
	options: ConversionOptions,
	choose: (parent: HybridConfig, source: SourceCheckpoint) => Submodel,
): Extraction {
	const source = openSource(options.source, options.from, options);
	let opened: Omit<Extraction, keyof PlannedConversion> & { readonly small: SourceCheckpoint };
	try {
		const { configuration: parent, config } = parentOf(source);
		const submodel = choose(config, source);
		const small = submodelSource(source, submodel);
		const dropsOptimizer = [...source.stored.tensors.keys()].some((name) => /(^|\.)optimizer\./.test(name));
		opened = { small, submodel, parent, child: small.configuration!, dropsOptimizer };
	} catch (error) {
		source[Symbol.dispose]();
		throw error;
	}
	const { small, ...rest } = opened;
	return { ...planConversion(options, small), ...rest };
}
