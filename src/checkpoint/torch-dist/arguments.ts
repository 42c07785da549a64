/**
 * Megatron's arguments of a language model, read and written by the table of options (config/language-model.ts). What Megatron's models cannot differ in has an
 * argument of our own where it does differ, so that a checkpoint that is converted there and back is the same model.
 */

import * as v from "valibot";
import { hasGatedActivation } from "../../config/derive.ts";
import { hasLayer } from "../../config/hybrid-pattern.ts";
import { elasticKeys } from "../../config/keys/elastic.ts";
import { latentAttentionKeys } from "../../config/keys/latent-attention.ts";
import { yarnKeys } from "../../config/keys/model.ts";
import {
	type LanguageKey,
	type LanguageModelConfiguration,
	toldKeys,
	withDefaults,
} from "../../config/language-model.ts";
import { perLayerSizes } from "../../config/per-layer.ts";
import { fieldOf, type Key, propertyOf, type TrainingConfiguration } from "../../config/schema.ts";
import { activationKeys, flaggedActivations } from "../../native/activations.ts";
import type { Json } from "../native/manifest.ts";
import type { JsonObject } from "./common.ts";

/** More MTP depths than any model has. */
const MOST_DEPTHS = 64;

/** Name of a key's argument. */
function argumentOf(key: Key): string {
	return fieldOf(key).argument ?? key.replaceAll("-", "_");
}

/** The value of a key's argument; `missing` where the argument is absent, or is of another type. */
function valueIn(args: JsonObject, key: Key, missing: unknown = fieldOf(key).default): unknown {
	const value = args[argumentOf(key)];
	return v.is(fieldOf(key).type.schema, value) ? value : missing;
}

function valuesIn(args: JsonObject, keys: readonly Key[]): JsonObject {
	return Object.fromEntries(keys.map((key) => [propertyOf(key), valueIn(args, key) as Json]));
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
	const hasLatents = hasLayer(pattern, "latentAttention");
	const told = toldKeys.filter((key) => {
		if (key in latentAttentionKeys) return hasLatents;
		return !perLayerSizes.some((size) => size.key === key) || Array.isArray(args[argumentOf(key)]);
	});
	const number = (key: LanguageKey, missing: number) => valueIn(args, key, missing) as number;
	const hiddenSize = number("hidden-size", 0);
	const numAttentionHeads = number("num-attention-heads", 1);
	const ffnHiddenSize = number("ffn-hidden-size", 4 * hiddenSize);
	const normEpsilon = number("norm-epsilon", typeof args.norm_epsilon === "number" ? args.norm_epsilon : 1e-5);
	const padded = typeof args.padded_vocab_size === "number" ? args.padded_vocab_size : 0;
	return {
		...(valuesIn(args, told) as unknown as LanguageModelConfiguration),
		hybridLayerPattern: pattern,
		numLayers: pattern.split("/")[0]!.replace(/[[\]]/g, "").length,
		mtpLossScalingFactor: number("mtp-loss-scaling-factor", 0.1),
		...{ hiddenSize, numAttentionHeads, ffnHiddenSize, normEpsilon },
		numQueryGroups:
			args.group_query_attention === true ? number("num-query-groups", numAttentionHeads) : numAttentionHeads,
		kvChannels: number("kv-channels", hiddenSize / numAttentionHeads),
		...activationKeys(flaggedActivations.find(([, { flag }]) => args[argumentOf(flag)] === true)?.[0] ?? null),
		// Megatron's rotary embedding of latents turns neighbouring columns.
		rotaryInterleaved: hasLatents ? args.latent_rotary_interleaved !== false : args.rotary_interleaved === true,
		...(hasLatents && { latentNormEpsilon: number("latent-norm-epsilon", normEpsilon) }),
		windowAttnSkipFreq: valueIn(
			{ window_attn_skip_freq: [args.window_attn_skip_freq ?? []].flat() },
			"window-attn-skip-freq",
		) as number[] | null,
		vocabSize: number("vocab-size", padded),
		maxPositionEmbeddings: number("max-position-embeddings", 0),
		untieEmbeddingsAndOutputWeights: args.untie_embeddings_and_output_weights === true,
		mambaNumHeads: number("mamba-num-heads", (2 * hiddenSize) / number("mamba-head-dim", 64)),
		numExperts: number("num-experts", 0),
		moeFfnHiddenSize: number("moe-ffn-hidden-size", ffnHiddenSize),
		...([args.moe_router_load_balancing_type].flat().includes("sinkhorn") && {
			moeRouterLoadBalancingType: ["sinkhorn"],
		}),
	};
}

/** An elastic model's keys by Megatron's arguments. Where sizes are given, Megatron's shares are its default. */
export function elasticFromArguments(args: JsonObject): JsonObject {
	const shares = (name: string) => name.endsWith("_per_list") && Array.isArray(args[name.replace("_per_", "_int_")]);
	const own = Object.fromEntries(Object.entries(args).filter(([name]) => !shares(name)));
	return valuesIn(own, Object.keys(elasticKeys) as Key[]);
}

/** Megatron's arguments of an elastic model; none of another one. */
export function elasticArguments(model: JsonObject): JsonObject {
	if (model.flextron !== true) return {};
	const told = (Object.keys(elasticKeys) as Key[]).filter((key) => model[propertyOf(key)] !== undefined);
	return Object.fromEntries(told.map((key) => [argumentOf(key), model[propertyOf(key)]!]));
}

/** The arguments that Megatron's loader compares, for a model that was never run by it. */
export function argumentsOf(description: LanguageModelConfiguration, paddedVocabularySize: number): JsonObject {
	const c = withDefaults(description);
	const values: Partial<TrainingConfiguration> = c;
	const { hybridLayerPattern: pattern, positionEmbeddingType: positions, windowAttnSkipFreq: skip } = c;
	const [hasLatents, hasDelta] = [hasLayer(pattern, "latentAttention"), hasLayer(pattern, "gdn")];
	const hasExperts = hasLayer(pattern, "moe");
	const depths = pattern.split("/").length - 1;
	const yarn = Object.keys(yarnKeys) as (keyof typeof yarnKeys)[];
	const rest = new Set(toldKeys);
	/** Arguments of those of the keys that `written` tells. */
	const named = (written: boolean | ((key: LanguageKey) => boolean), ...keys: readonly LanguageKey[]): JsonObject => {
		for (const key of keys) rest.delete(key);
		const those = keys.filter((key) => (typeof written === "boolean" ? written : written(key)));
		return Object.fromEntries(those.map((key) => [argumentOf(key), (values[propertyOf(key)] ?? null) as Json]));
	};
	const differs = (key: LanguageKey) => !Bun.deepEquals(values[propertyOf(key)], fieldOf(key).default);
	return {
		tensor_model_parallel_size: 1,
		pipeline_model_parallel_size: 1,
		...named(true, "num-layers"),
		...(depths > 0 && { mtp_num_layers: depths }),
		...named(depths > 0, "mtp-loss-scaling-factor", "mtp-use-repeated-layer"),
		...named(true, "hidden-size", "ffn-hidden-size", "num-attention-heads"),
		group_query_attention: true,
		...named(true, "num-query-groups", "kv-channels", "hybrid-layer-pattern"),
		...named(true, ...flaggedActivations.map(([, { flag }]) => flag)),
		gated_linear_unit: hasGatedActivation(c),
		...named(true, "activation-func-clamp-value", "glu-linear-offset", "add-bias-linear"),
		...named(differs, "add-qkv-bias", "qk-layernorm", "apply-layernorm-1p", "attention-output-gate"),
		...(hasDelta && { experimental_attention_variant: "gated_delta_net" }),
		...named(hasDelta, "linear-conv-kernel-dim", "linear-key-head-dim", "linear-value-head-dim"),
		...named(hasDelta, "linear-num-key-heads", "linear-num-value-heads"),
		...named(
			differs,
			"post-layernorm",
			"softmax-scale",
			"embedding-multiplier",
			"embedding-padding-idx",
			"softmax-type",
		),
		...(hasLatents && { multi_latent_attention: true }),
		...named(
			hasLatents,
			"q-lora-rank",
			"kv-lora-rank",
			"qk-head-dim",
			"qk-pos-emb-head-dim",
			"v-head-dim",
			"rope-type",
		),
		...named(hasLatents, "rotary-base"),
		...named(hasLatents && c.ropeType !== "rope", ...yarn),
		...named(hasLatents && (c.latentNormEpsilon ?? c.normEpsilon) !== c.normEpsilon, "latent-norm-epsilon"),
		...(hasLatents && c.rotaryInterleaved === false && { latent_rotary_interleaved: false }),
		...named(!hasLatents && c.rotaryInterleaved === true, "rotary-interleaved"),
		...named(differs, "window-size"),
		...named(c.windowSize !== null && skip !== null, "window-attn-skip-freq"),
		// A number stands for every n-th layer.
		...(c.windowSize && skip?.length === 1 && { window_attn_skip_freq: skip[0]! }),
		...named(true, "normalization", "norm-epsilon", "init-method-std", "hidden-dropout", "attention-dropout"),
		...named(true, "mamba-num-heads", "mamba-head-dim", "mamba-num-groups", "mamba-state-dim"),
		...named(hasExperts, "num-experts", "moe-router-topk", "moe-ffn-hidden-size"),
		...named(hasExperts && differs, "moe-latent-size"),
		...named(hasExperts, "moe-shared-expert-intermediate-size"),
		...named(hasExperts && differs, "moe-shared-expert-gate"),
		...(hasExperts &&
			c.moeRouterLoadBalancingType.includes("sinkhorn") && { moe_router_load_balancing_type: "sinkhorn" }),
		...named(hasExperts, "moe-router-score-function", "moe-router-pre-softmax", "moe-router-enable-expert-bias"),
		...named(hasExperts, "moe-router-topk-scaling-factor"),
		...named(hasExperts && c.moeRouterNumGroups > 1, "moe-router-num-groups", "moe-router-group-topk"),
		...named(differs, ...perLayerSizes.map(({ key }) => key), "mamba-conv-kernel-dim"),
		...named(true, "untie-embeddings-and-output-weights", "position-embedding-type"),
		...named(positions === "rope" || positions === "yarn", "rotary-base", "rotary-percent"),
		...named(differs, "rotary-base-local", "rotary-seq-len-interpolation-factor"),
		...named(positions === "yarn", ...yarn),
		...named(c.useRopeScaling, "use-rope-scaling", "rope-scaling-factor", "rope-scaling-low-freq-factor"),
		...named(c.useRopeScaling, "rope-scaling-high-freq-factor", "rope-scaling-original-max-position-embeddings"),
		add_position_embedding: true,
		...named(true, "max-position-embeddings", "vocab-size"),
		padded_vocab_size: paddedVocabularySize,
		consumed_train_samples: 0,
		consumed_valid_samples: 0,
		// A constant in Megatron.
		...named(false, "mamba-chunk-size"),
		...named(differs, ...rest),
	};
}
