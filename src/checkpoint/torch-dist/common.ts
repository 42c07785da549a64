/**
 * Converts Megatron's common state (docs/spec/checkpoint.md §1.7, §3.6) to JSON and back: arguments, learning-rate schedule,
 * counters and optimizer groups. Instances of Python classes are not written back.
 */
import { perLayerSizes } from "../../config/per-layer.ts";
import { UserError } from "../../system/errors.ts";
import { dtypes, isDtypeTag } from "../dtype.ts";
import type { LanguageModelConfiguration } from "../hf/configuration.ts";
import type { Json } from "../native/manifest.ts";
import { Global, PythonObject, TorchDtype, Tuple } from "../pickle/values.ts";
import { PythonFloat } from "../pickle/writer.ts";

/** Most values of a state: shared references could make the JSON of a small pickle huge. */
const LARGEST_STATE = 2_000_000;
const DEEPEST_STATE = 64;
/** More MTP depths than any model has. */
const MOST_DEPTHS = 64;

export type JsonObject = { readonly [key: string]: Json };

/**
 * The JSON of a Python value: tuples become lists, dtypes their names, instances of a class `{"__class__": …}`. `where`: the
 * file or item that the error about a too large value names.
 */
export function jsonOf(value: unknown, where: string): Json {
	let nodes = 0;
	/** Keys and indices from the root to the current value. */
	const path: string[] = [];
	const at = (key: string, item: unknown): Json => {
		path.push(key);
		const json = visit(item);
		path.pop();
		return json;
	};
	const list = (items: Iterable<unknown>): Json => Array.from(items, (item, i) => at(String(i), item));
	const visit = (entry: unknown): Json => {
		if (++nodes > LARGEST_STATE || path.length > DEEPEST_STATE) {
			const key = path.slice(0, 3).join(".") || "the object itself";
			throw new UserError(
				`${where}: ${key} has more than ${DEEPEST_STATE} levels, or the object more than ${LARGEST_STATE} values.`,
			);
		}
		if (entry === null || typeof entry === "boolean" || typeof entry === "string") return entry;
		if (typeof entry === "number") return Number.isFinite(entry) ? entry : { __float__: String(entry) };
		if (typeof entry === "bigint") return entry.toString();
		if (entry instanceof TorchDtype) return `torch.${dtypes[entry.tag].torch}`;
		if (entry instanceof Tuple) return list(entry.items);
		if (Array.isArray(entry) || entry instanceof Set) return list(entry);
		if (entry instanceof Map) return object(entry);
		if (entry instanceof PythonObject) {
			if (/^(argparse|types)\./.test(String(entry.type)) && entry.state instanceof Map) return object(entry.state);
			return { __class__: String(entry.type), args: list(entry.args) };
		}
		return { __class__: (entry as object).constructor?.name ?? "unknown" };
	};
	const object = (entries: ReadonlyMap<unknown, unknown>): Json =>
		Object.fromEntries(
			Array.from(entries, ([key, item]) => {
				const name =
					typeof key === "string" || typeof key === "number" ? String(key) : JSON.stringify(at("a key", key));
				return [name, at(name, item)];
			}),
		);
	return visit(value);
}

/** The Python value of JSON; undefined for an instance of a class, whose key is then left out. */
export function pythonOf(value: Json): unknown {
	if (typeof value === "string") {
		const tag = Object.entries(dtypes).find(([, { torch }]) => value === `torch.${torch}`)?.[0];
		return isDtypeTag(tag) ? new TorchDtype(tag) : value;
	}
	if (Array.isArray(value)) {
		const items = value.map(pythonOf);
		return items.includes(undefined) ? undefined : items;
	}
	if (typeof value !== "object" || value === null) return value;
	const entries = value as JsonObject;
	if (typeof entries.__float__ === "string") return new PythonFloat(Number(entries.__float__));
	if (entries.__class__ !== undefined) return undefined;
	return pythonMap(entries);
}

export function pythonMap(entries: JsonObject): Map<string, unknown> {
	return new Map(
		Object.entries(entries)
			.map(([key, entry]) => [key, pythonOf(entry)] as const)
			.filter(([, entry]) => entry !== undefined),
	);
}

/** argparse's Namespace with these attributes. */
export function namespace(attributes: JsonObject): PythonObject {
	const object = new PythonObject(new Global("argparse", "Namespace"), []);
	object.state = pythonMap(attributes);
	return object;
}

export function isJsonObject(value: Json | undefined): value is JsonObject {
	return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * The layer pattern among Megatron's arguments, with its cuts, groups and MTP depths; null: they are of a GPT model, or of
 * none.
 */
export function patternOfArguments(args: JsonObject): string | null {
	const pattern = args.hybrid_layer_pattern ?? args.hybrid_override_pattern;
	if (typeof pattern !== "string") return null;
	const main = pattern.replace(/\/+$/, "");
	// Megatron-Bridge keeps the layers of a depth and the number of depths apart.
	const { mtp_num_layers: depths, mtp_hybrid_override_pattern: depth } = args;
	if (main.includes("/") || typeof depth !== "string" || typeof depths !== "number") return main;
	return main + `/${depth}`.repeat(Math.max(0, Math.min(depths, MOST_DEPTHS)));
}

/** The language model's configuration from Megatron's arguments; null if they name no hybrid model. */
export function configurationFromArguments(args: JsonObject): LanguageModelConfiguration | null {
	const pattern = patternOfArguments(args)?.replaceAll("|", "");
	if (pattern === undefined) return null;
	const number = (name: string, missing: number): number => {
		const value = args[name];
		return typeof value === "number" ? value : missing;
	};
	const hidden = number("hidden_size", 0);
	const heads = number("num_attention_heads", 1);
	const mambaHeadDim = number("mamba_head_dim", 64);
	const ffn = number("ffn_hidden_size", 4 * hidden);
	return {
		hybridLayerPattern: pattern,
		mtpUseRepeatedLayer: args.mtp_use_repeated_layer === true,
		mtpLossScalingFactor: number("mtp_loss_scaling_factor", 0.1),
		numLayers: pattern.split("/")[0]!.replace(/[[\]]/g, "").length,
		hiddenSize: hidden,
		ffnHiddenSize: ffn,
		numAttentionHeads: heads,
		numQueryGroups: args.group_query_attention === true ? number("num_query_groups", heads) : heads,
		kvChannels: number("kv_channels", hidden / heads),
		squaredRelu: args.squared_relu === true,
		swiglu: args.swiglu === true,
		quickGeglu: args.quick_geglu === true,
		activationFuncClampValue:
			typeof args.activation_func_clamp_value === "number" ? args.activation_func_clamp_value : null,
		gluLinearOffset: number("glu_linear_offset", 0),
		addBiasLinear: args.add_bias_linear === true,
		// A hybrid model takes every other type for none.
		positionEmbeddingType: args.position_embedding_type === "rope" ? "rope" : "none",
		rotaryBase: number("rotary_base", 10000),
		rotaryPercent: number("rotary_percent", 1),
		normEpsilon: number("layernorm_epsilon", number("norm_epsilon", 1e-5)),
		initMethodStd: number("init_method_std", 0.02),
		vocabSize: number("vocab_size", number("padded_vocab_size", 0)),
		maxPositionEmbeddings: number("max_position_embeddings", 0),
		untieEmbeddingsAndOutputWeights: args.untie_embeddings_and_output_weights === true,
		hiddenDropout: number("hidden_dropout", 0),
		attentionDropout: number("attention_dropout", 0),
		mambaNumHeads: number("mamba_num_heads", (2 * hidden) / mambaHeadDim),
		mambaHeadDim,
		mambaNumGroups: number("mamba_num_groups", 8),
		mambaStateDim: number("mamba_state_dim", 128),
		mambaConvKernelDim: 4,
		mambaChunkSize: 128,
		numExperts: number("num_experts", 0),
		moeRouterTopk: number("moe_router_topk", 2),
		moeFfnHiddenSize: number("moe_ffn_hidden_size", ffn),
		moeSharedExpertIntermediateSize: number("moe_shared_expert_intermediate_size", 0),
		moeRouterScoreFunction: args.moe_router_score_function === "sigmoid" ? "sigmoid" : "softmax",
		moeRouterPreSoftmax: args.moe_router_pre_softmax === true,
		moeRouterEnableExpertBias: args.moe_router_enable_expert_bias === true,
		moeRouterTopkScalingFactor: number("moe_router_topk_scaling_factor", 1),
		moeRouterNumGroups: number("moe_router_num_groups", 1),
		moeRouterGroupTopk: number("moe_router_group_topk", 1),
		...Object.fromEntries(
			perLayerSizes.flatMap(({ list, key }) => {
				const sizes = args[key.replaceAll("-", "_")];
				return Array.isArray(sizes) && sizes.every(Number.isSafeInteger) ? [[list, sizes as number[]]] : [];
			}),
		),
	};
}
