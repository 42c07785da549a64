/**
 * NemotronH: one block a layer, Mamba-2, attention without positions, dense MLPs or experts with relu². Its config.json in the program's
 * keys (Megatron's flag names in camelCase) and back: docs/spec/language-model.md §10, docs/spec/checkpoint.md §4.1. Fields of models that
 * this program does not have are refused by name.
 */

import {
	hasLayer,
	type LayerKind,
	layerSymbols,
	parseHybridPattern,
	storedPattern,
} from "../../../config/hybrid-pattern.ts";
import { familyDefaults } from "../../../config/language-model.ts";
import { hasOwnSizes, modelOfLayer, type PerLayerSize, perLayerSizes } from "../../../config/per-layer.ts";
import { activationKeys } from "../../../native/activations.ts";
import { counted } from "../../../system/counted.ts";
import { pythonFloat } from "../json.ts";
import {
	type Family,
	fraction,
	type Json,
	type LanguageModelConfiguration,
	type Refuse,
	readAlike,
	refusalAt,
} from "./family.ts";
import { addNemotronH, detectNemotronH, requireCounts, spellings } from "./nemotron-h-names.ts";

/** Layer kinds as config.json spells them, newest first. */
const layerTypes: Readonly<Record<string, LayerKind>> = {
	linear_attention: "mamba",
	mamba: "mamba",
	full_attention: "attention",
	attention: "attention",
	moe: "moe",
	mlp: "mlp",
};
const typeOfSymbol = Object.fromEntries(
	Object.entries(layerTypes)
		.reverse()
		.map(([type, kind]) => [layerSymbols[kind], type]),
);

/** Sizes with the defaults of transformers' NemotronHConfig. */
const sizes = {
	hiddenSize: ["hidden_size", 4096],
	ffnHiddenSize: ["intermediate_size", 21504],
	numAttentionHeads: ["num_attention_heads", 32],
	numQueryGroups: ["num_key_value_heads", 8],
	kvChannels: ["head_dim", 128],
	vocabSize: ["vocab_size", 131072],
	maxPositionEmbeddings: ["max_position_embeddings", 4096],
	mambaNumHeads: ["mamba_num_heads", 128],
	mambaHeadDim: ["mamba_head_dim", 64],
	mambaNumGroups: ["n_groups", 8],
	mambaStateDim: ["ssm_state_size", 128],
	mambaConvKernelDim: ["conv_kernel", 4],
	mambaChunkSize: ["chunk_size", 128],
	numExperts: ["n_routed_experts", 8],
	moeRouterTopk: ["num_experts_per_tok", 2],
	moeFfnHiddenSize: ["moe_intermediate_size", 7688],
	moeSharedExpertIntermediateSize: ["moe_shared_expert_intermediate_size", 7688],
	moeRouterNumGroups: ["n_group", 1],
	moeRouterGroupTopk: ["topk_group", 1],
} as const satisfies Partial<Record<keyof LanguageModelConfiguration, readonly [string, number]>>;

const numbers = {
	normEpsilon: ["layer_norm_epsilon", 1e-5],
	initMethodStd: ["initializer_range", 0.02],
	hiddenDropout: ["hidden_dropout", 0],
	attentionDropout: ["attention_dropout", 0],
	moeRouterTopkScalingFactor: ["routed_scaling_factor", 1],
} as const satisfies Partial<Record<keyof LanguageModelConfiguration, readonly [string, number]>>;

/** Fields with the only value this program's model has; an absent one has it. */
const fixed: Readonly<Record<string, unknown>> = {
	attention_bias: false,
	mlp_bias: false,
	use_bias: false,
	mamba_proj_bias: false,
	use_conv_bias: true,
	mlp_hidden_act: "relu2",
	mamba_hidden_act: "silu",
	residual_in_fp32: false,
	sliding_window: null,
};

/** Values that hold for every NemotronH model of Hugging Face, whose config.json has no field for them. */
const always = {
	...familyDefaults,
	...activationKeys("squaredRelu"),
	...{ rotaryBase: 10000, rotaryPercent: 1, rotaryBaseLocal: null },
	moeRouterScoreFunction: "sigmoid",
	moeRouterEnableExpertBias: true,
} as const satisfies Partial<LanguageModelConfiguration>;

/** Older spellings that transformers still accepts. */
const aliases: Readonly<Record<string, string>> = {
	mamba_n_groups: "n_groups",
	mamba_d_conv: "conv_kernel",
	mamba_chunk_size: "chunk_size",
	mamba_conv_bias: "use_conv_bias",
	mamba_dt_limit: "time_step_limit",
	layer_types: "layers_block_type",
	num_local_experts: "n_routed_experts",
};

/** Reads the parsed config.json of a NemotronH model; `path` is for errors. */
function configurationFromNemotronH(json: Json, path: string): LanguageModelConfiguration {
	const values: Record<string, unknown> = { ...json };
	for (const [old, name] of Object.entries(aliases)) {
		if (Object.hasOwn(values, old) && !Object.hasOwn(values, name)) values[name] = values[old];
	}
	const bad = refusalAt(path);
	for (const [name, only] of Object.entries(fixed)) {
		const value = values[name];
		if (value !== undefined && value !== only) {
			bad(`${name} is ${JSON.stringify(value)}, this program's model has only ${JSON.stringify(only)}`);
		}
	}
	const limit = values.time_step_limit;
	if (limit !== undefined && !(Array.isArray(limit) && limit[0] === 0 && limit[1] === Number.POSITIVE_INFINITY)) {
		bad("time_step_limit is not [0, Infinity], and this program never clamps the time step");
	}
	const whole = (name: string, missing: number): number => {
		const value = values[name] ?? missing;
		if (Number.isSafeInteger(value) && (value as number) >= 0) return value as number;
		return bad(`${name} is ${JSON.stringify(value)}, expected a whole number`);
	};
	const main = mainPattern(values, bad);
	const pattern = main + mtpPattern(values, whole("num_nextn_predict_layers", 0), bad);
	const configuration: Record<string, unknown> = { hybridLayerPattern: pattern, numLayers: main.length };
	for (const [key, [name, missing]] of Object.entries(sizes)) configuration[key] = whole(name, missing);
	for (const [key, [name, missing]] of Object.entries(numbers))
		configuration[key] = fraction(values, name, missing, bad);
	if (Number(configuration.numAttentionHeads) % Number(configuration.numQueryGroups) !== 0) {
		bad("num_attention_heads is not a multiple of num_key_value_heads");
	}
	// As in Megatron, the scores of the chosen experts are normalised unless only one is chosen.
	const normalised = Number(configuration.moeRouterTopk) > 1;
	const written = values.norm_topk_prob ?? true;
	if (hasLayer(pattern, "moe") && written !== normalised) {
		bad(
			`norm_topk_prob is ${JSON.stringify(written)} where num_experts_per_tok is ${configuration.moeRouterTopk}, ` +
				`this program's model has only ${normalised} there`,
		);
	}
	// Where every group is kept, their scores do not matter.
	const { moeRouterTopk: topk, moeRouterNumGroups: groups, moeRouterGroupTopk: kept } = configuration;
	if (hasLayer(pattern, "moe") && Number(kept) < Number(groups) && Math.floor(Number(topk) / Number(kept)) !== 2) {
		bad(
			`num_experts_per_tok is ${topk} and topk_group ${kept}: transformers scores a group by its two best experts, this ` +
				"program, as Megatron, by num_experts_per_tok / topk_group of them, which has to be 2 too",
		);
	}
	const latent = values.moe_latent_size ?? null;
	const moeLatentSize = latent === null ? null : whole("moe_latent_size", 0);
	if (moeLatentSize === 0) bad("moe_latent_size is 0, expected null or a whole number from 1");
	const untied = values.tie_word_embeddings !== true;
	const model = {
		...always,
		...configuration,
		moeLatentSize,
		untieEmbeddingsAndOutputWeights: untied,
	} as LanguageModelConfiguration;
	return { ...model, ...ownSizesIn(values.block_configs, model, bad) };
}

/** Keys of sizes that a config.json leaves to transformers' defaults. */
function missingKeys(json: Json): ReadonlySet<string> {
	const given = new Set(Object.keys(json).map((name) => aliases[name] ?? name));
	return new Set(
		[...Object.values(sizes), ...Object.values(numbers)].map(([name]) => name).filter((name) => !given.has(name)),
	);
}

/** The layers as a list of types, as a pattern, or as both; null: as neither. */
function layersIn(values: Record<string, unknown>, list: string, text: string, bad: Refuse): string | null {
	const { [list]: types, [text]: written } = values;
	let pattern: string | null = null;
	if (Array.isArray(types)) {
		pattern = types
			.map((type, index) =>
				typeof type === "string" && Object.hasOwn(layerTypes, type)
					? layerSymbols[layerTypes[type]!]
					: bad(`${list}[${index}] is ${JSON.stringify(type)}, no known layer type`),
			)
			.join("");
	}
	if (typeof written === "string") {
		const position = [...written].findIndex((symbol) => !Object.hasOwn(typeOfSymbol, symbol));
		if (position >= 0) bad(`${text} has ${JSON.stringify(written[position])} at position ${position + 1}`);
		if (pattern !== null && pattern !== written) bad(`${list} and ${text} disagree`);
		pattern = written;
	}
	return pattern;
}

/** More depths than any model has. */
const mostDepths = 64;

/** The MTP depths of a pattern, each after a `/`. */
function mtpPattern(values: Record<string, unknown>, depths: number, bad: Refuse): string {
	if (depths === 0) return "";
	if (depths > mostDepths) bad(`num_nextn_predict_layers is ${depths}, at most ${mostDepths} are read`);
	// transformers' default.
	const layers = layersIn(values, "mtp_layers_block_type", "mtp_hybrid_override_pattern", bad) ?? "*E";
	if (layers === "") bad(`num_nextn_predict_layers is ${depths}, and mtp_hybrid_override_pattern names no layers`);
	return `/${layers}`.repeat(depths);
}

function mainPattern(values: Record<string, unknown>, bad: Refuse): string {
	const { hybrid_override_pattern: written, num_hidden_layers: layers } = values;
	const pattern = layersIn(values, "layers_block_type", "hybrid_override_pattern", bad);
	if (!pattern) return bad("neither layers_block_type nor hybrid_override_pattern names the layers");
	if (typeof layers === "number" && layers !== pattern.length) {
		const list = typeof written === "string" ? "hybrid_override_pattern" : "layers_block_type";
		bad(`num_hidden_layers is ${layers}, ${list} has ${counted(pattern.length, "layer")}`);
	}
	return pattern;
}

/**
 * A config.json that both the published model code and transformers' class read: the layers in both spellings. The
 * dtype is that of the written weights. Throws a UserError for a model that Hugging Face's NemotronH is not.
 */
function configurationToNemotronH(
	configuration: LanguageModelConfiguration,
	dtype: string,
	path: string,
): Record<string, unknown> {
	const json: Record<string, unknown> = { architectures: ["NemotronHForCausalLM"], model_type: "nemotron_h" };
	const stored = storedPattern(configuration.hybridLayerPattern, {
		repeated: configuration.mtpUseRepeatedLayer === true,
	});
	const [main = "", ...depths] = stored.split("/");
	const typesOf = (layers: string) => [...layers].map((symbol) => typeOfSymbol[symbol]);
	for (const [key, [name]] of Object.entries(sizes)) json[name] = configuration[key as keyof typeof sizes];
	for (const [key, [name]] of Object.entries(numbers)) {
		json[name] = pythonFloat(configuration[key as keyof typeof numbers]);
	}
	const written = {
		...json,
		...fixed,
		norm_topk_prob: configuration.moeRouterTopk > 1,
		num_nextn_predict_layers: depths.length,
		layers_block_type: typesOf(main),
		hybrid_override_pattern: main,
		...(depths[0] === undefined
			? {}
			: { mtp_layers_block_type: typesOf(depths[0]), mtp_hybrid_override_pattern: depths[0] }),
		num_hidden_layers: main.length,
		moe_latent_size: configuration.moeLatentSize ?? null,
		n_shared_experts: configuration.moeSharedExpertIntermediateSize > 0 ? 1 : 0,
		time_step_limit: [pythonFloat(0), Number.POSITIVE_INFINITY],
		tie_word_embeddings: !configuration.untieEmbeddingsAndOutputWeights,
		...(hasOwnSizes(configuration) ? { block_configs: blockConfigs(configuration) } : {}),
		torch_dtype: dtype,
	};
	return readAlike(written, configuration, path, { title: "NemotronH", read: configurationFromNemotronH });
}

/*
 * Sizes of single layers: `block_configs`, one entry a layer as Model-Optimizer writes them for heterogeneous models
 * (docs/spec/elastic.md §16), such as {"subblock_configs": [{"kind": "mamba", "name": "mamba", "num_heads": 8}]}. Only what differs
 * between layers is written; every other size of an entry must be the model's.
 */

type Lists = { readonly [List in PerLayerSize["list"]]?: readonly number[] };
type Sizes = { readonly [Size in PerLayerSize["size"]]: number };

/** The kind of a layer's entry, and its fields that are sizes of layers. */
const kinds: Readonly<
	Partial<Record<LayerKind, { readonly kind: string; readonly fields: Readonly<Record<string, keyof Sizes>> }>>
> = {
	mamba: { kind: "mamba", fields: { num_heads: "mambaNumHeads" } },
	attention: { kind: "attention", fields: { num_query_heads: "numAttentionHeads" } },
	moe: { kind: "moe", fields: { num_experts: "numExperts", expert_intermediate_size: "moeFfnHiddenSize" } },
	mlp: { kind: "ffn", fields: {} },
};

/** Fields that are the same in all layers here. */
const uniform: Readonly<Record<string, keyof LanguageModelConfiguration>> = {
	state_dim: "mambaStateDim",
	head_dim: "mambaHeadDim",
	num_groups: "mambaNumGroups",
	conv_kernel_size: "mambaConvKernelDim",
	num_kv_heads: "numQueryGroups",
	qk_head_dim: "kvChannels",
	v_head_dim: "kvChannels",
	shared_expert_intermediate_size: "moeSharedExpertIntermediateSize",
	top_k: "moeRouterTopk",
	intermediate_size: "ffnHiddenSize",
};

/** One entry for every layer of the main part. */
function blockConfigs(configuration: LanguageModelConfiguration): unknown[] {
	return parseHybridPattern(configuration.hybridLayerPattern).map((layer, index) => {
		const { kind, fields } = kinds[layer]!;
		const own = modelOfLayer(configuration, index);
		const sizes = Object.fromEntries(Object.entries(fields).map(([field, size]) => [field, own[size]]));
		return { subblock_configs: [{ kind, name: kind, no_op: false, ...sizes }] };
	});
}

/** The sizes that `block_configs` gives to layers; {} without such a key. Throws through `bad` where an entry fits no layer of this program. */
function ownSizesIn(blocks: unknown, model: LanguageModelConfiguration, bad: Refuse): Lists {
	if (blocks === undefined || blocks === null) return {};
	const pattern = parseHybridPattern(model.hybridLayerPattern);
	if (!Array.isArray(blocks) || blocks.length !== pattern.length) {
		return bad(`block_configs is not a list with one entry for each of the ${pattern.length} layers`);
	}
	const found = new Map<keyof Sizes, number[]>();
	for (const [index, layer] of pattern.entries()) {
		const entry = entryOf(blocks[index], kinds[layer]!.kind, `block_configs[${index}]`, bad);
		for (const [field, value] of Object.entries(entry)) {
			const shared = uniform[field];
			if (shared !== undefined && value !== null && value !== model[shared]) {
				bad(
					`block_configs[${index}]: ${field} is ${JSON.stringify(value)}, this program's layers have all ${model[shared]}`,
				);
			}
		}
		for (const [field, size] of Object.entries(kinds[layer]!.fields)) {
			const value = entry[field] ?? model[size];
			if (!Number.isSafeInteger(value) || (value as number) < 1) {
				bad(`block_configs[${index}]: ${field} is ${JSON.stringify(value)}, expected a whole number`);
			}
			found.set(size, [...(found.get(size) ?? []), value as number]);
		}
	}
	return Object.fromEntries(
		perLayerSizes.flatMap(({ size, list }) => {
			const sizes = found.get(size) ?? [];
			return sizes.every((one) => one === model[size]) ? [] : [[list, sizes]];
		}),
	);
}

/** The one sub-block of a layer's entry, which must be of its kind. */
function entryOf(block: unknown, kind: string, where: string, bad: Refuse): Readonly<Record<string, unknown>> {
	const { subblock_configs: parts } = (block ?? {}) as { readonly subblock_configs?: unknown };
	const part: unknown = Array.isArray(parts) && parts.length === 1 ? parts[0] : null;
	if (typeof part !== "object" || part === null) return bad(`${where} has not one sub-block`);
	const entry = part as Readonly<Record<string, unknown>>;
	if (entry.kind !== kind) return bad(`${where} is of kind ${JSON.stringify(entry.kind)}, its layer is one of ${kind}`);
	if (entry.no_op === true)
		return bad(`${where} is a no_op, and this program's layers all compute; leave it out of the pattern`);
	return entry;
}

export const nemotronH: Family = {
	modelType: "nemotron_h",
	title: "NemotronH",
	embedding: "embeddings.weight",
	blocks: 1,
	read: configurationFromNemotronH,
	missing: missingKeys,
	describes: ({ squaredRelu }) => squaredRelu,
	write: configurationToNemotronH,
	detect: detectNemotronH,
	spelling: spellings.published,
	requireCounts,
	addNames: addNemotronH,
};
