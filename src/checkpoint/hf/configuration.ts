/**
 * config.json of Hugging Face's NemotronH ↔ the program's configuration keys (Megatron's flag names in camelCase).
 * docs/spec/language-model.md §10, docs/spec/checkpoint.md §4.1. Fields of models that this program does not have are
 * refused by name.
 */
import { hasLayer, type LayerKind, layerSymbols, storedPattern } from "../../config/hybrid-pattern.ts";
import { hasOwnSizes } from "../../config/per-layer.ts";
import { modelDifferences } from "../../config/same-model.ts";
import { type ActivationKey, activationKeys } from "../../native/activations.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { blockConfigs, ownSizesIn } from "./block-configs.ts";
import { formatPythonJson, parsePythonJson, pythonFloat } from "./json.ts";

/** The part of the configuration that decides the language model's function. */
export interface LanguageModelConfiguration extends Readonly<Record<ActivationKey, boolean>> {
	/** Main part and MTP depths. */
	readonly hybridLayerPattern: string;
	/** Absent: the format does not tell. */
	readonly mtpUseRepeatedLayer?: boolean;
	readonly mtpLossScalingFactor?: number;
	/** Number of layers of the main part. */
	readonly numLayers: number;
	readonly hiddenSize: number;
	readonly ffnHiddenSize: number;
	readonly numAttentionHeads: number;
	readonly numQueryGroups: number;
	readonly kvChannels: number;
	/** null: no clamp. */
	readonly activationFuncClampValue: number | null;
	readonly gluLinearOffset: number;
	readonly addBiasLinear: boolean;
	/** Absent, here and below: false, or the key's default. */
	readonly addQkvBias?: boolean;
	readonly qkLayernorm?: boolean;
	readonly positionEmbeddingType: "none" | "rope";
	readonly rotaryBase: number;
	readonly rotaryPercent: number;
	readonly useRopeScaling?: boolean;
	readonly ropeScalingFactor?: number;
	readonly ropeScalingLowFreqFactor?: number;
	readonly ropeScalingHighFreqFactor?: number;
	readonly ropeScalingOriginalMaxPositionEmbeddings?: number;
	readonly normEpsilon: number;
	readonly initMethodStd: number;
	readonly vocabSize: number;
	readonly maxPositionEmbeddings: number;
	readonly untieEmbeddingsAndOutputWeights: boolean;
	readonly hiddenDropout: number;
	readonly attentionDropout: number;
	readonly mambaNumHeads: number;
	/** Lists of layers with sizes of their own; absent or null: all have the model's. */
	readonly mambaNumHeadsPerLayer?: readonly number[] | null;
	readonly numAttentionHeadsPerLayer?: readonly number[] | null;
	readonly numExpertsPerLayer?: readonly number[] | null;
	readonly moeFfnHiddenSizePerLayer?: readonly number[] | null;
	readonly mambaHeadDim: number;
	readonly mambaNumGroups: number;
	readonly mambaStateDim: number;
	readonly mambaConvKernelDim: number;
	readonly mambaChunkSize: number;
	readonly numExperts: number;
	readonly moeRouterTopk: number;
	readonly moeFfnHiddenSize: number;
	readonly moeSharedExpertIntermediateSize: number;
	readonly moeRouterScoreFunction: "sigmoid" | "softmax";
	readonly moeRouterPreSoftmax: boolean;
	readonly moeRouterEnableExpertBias: boolean;
	readonly moeRouterTopkScalingFactor: number;
	readonly moeRouterNumGroups: number;
	readonly moeRouterGroupTopk: number;
}

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
	moe_latent_size: null,
};

/** Values that hold for every NemotronH model of Hugging Face, whose config.json has no field for them. */
const always = {
	...activationKeys("squaredRelu"),
	activationFuncClampValue: null,
	gluLinearOffset: 0,
	addBiasLinear: false,
	addQkvBias: false,
	qkLayernorm: false,
	positionEmbeddingType: "none",
	rotaryBase: 10000,
	rotaryPercent: 1,
	moeRouterScoreFunction: "sigmoid",
	moeRouterPreSoftmax: false,
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
export function configurationFromNemotronH(
	json: Readonly<Record<string, unknown>>,
	path: string,
): LanguageModelConfiguration {
	const values: Record<string, unknown> = { ...json };
	for (const [old, name] of Object.entries(aliases)) {
		if (Object.hasOwn(values, old) && !Object.hasOwn(values, name)) values[name] = values[old];
	}
	const bad = (sentence: string): never => {
		throw new UserError(`${path}: ${sentence}.`);
	};
	for (const [name, only] of Object.entries(fixed)) {
		const value = values[name];
		if (value !== undefined && value !== only && !(value === null && only === 0)) {
			bad(`${name} is ${JSON.stringify(value)}, this program's model has only ${JSON.stringify(only)}`);
		}
	}
	const limit = values.time_step_limit;
	if (limit !== undefined && !(Array.isArray(limit) && limit[0] === 0 && limit[1] === Number.POSITIVE_INFINITY)) {
		bad("time_step_limit is not [0, Infinity], and this program never clamps the time step");
	}
	const read = (name: string, missing: number, whole: boolean): number => {
		const value = values[name] ?? missing;
		if (typeof value !== "number" || !Number.isFinite(value) || value < 0 || (whole && !Number.isSafeInteger(value))) {
			return bad(`${name} is ${JSON.stringify(value)}, expected ${whole ? "a whole" : "a"} number`);
		}
		return value;
	};
	const main = mainPattern(values, bad);
	const pattern = main + mtpPattern(values, read("num_nextn_predict_layers", 0, true), bad);
	const configuration: Record<string, unknown> = { hybridLayerPattern: pattern, numLayers: main.length };
	for (const [key, [name, missing]] of Object.entries(sizes)) configuration[key] = read(name, missing, true);
	for (const [key, [name, missing]] of Object.entries(numbers)) configuration[key] = read(name, missing, false);
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
	const untied = values.tie_word_embeddings !== true;
	const model = { ...configuration, ...always, untieEmbeddingsAndOutputWeights: untied } as LanguageModelConfiguration;
	return { ...model, ...ownSizesIn(values.block_configs, model, bad) };
}

/** Keys of sizes that a config.json leaves to transformers' defaults. */
export function missingKeys(json: Readonly<Record<string, unknown>>): ReadonlySet<string> {
	const given = new Set(Object.keys(json).map((name) => aliases[name] ?? name));
	return new Set(
		[...Object.values(sizes), ...Object.values(numbers)].map(([name]) => name).filter((name) => !given.has(name)),
	);
}

type Refuse = (sentence: string) => never;

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
export function configurationToNemotronH(
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
		n_shared_experts: configuration.moeSharedExpertIntermediateSize > 0 ? 1 : 0,
		time_step_limit: [pythonFloat(0), Number.POSITIVE_INFINITY],
		tie_word_embeddings: !configuration.untieEmbeddingsAndOutputWeights,
		...(hasOwnSizes(configuration) ? { block_configs: blockConfigs(configuration) } : {}),
		torch_dtype: dtype,
	};
	// The folder describes the same model to every reader, or it is not written.
	const read = configurationFromNemotronH(parsePythonJson(formatPythonJson(written), path), path);
	const differences = modelDifferences({ ...read }, { ...configuration });
	if (differences.length > 0) {
		throw new UserError(`${path}: Hugging Face's NemotronH is another model: ${differences.join("; ")}.`);
	}
	return written;
}
