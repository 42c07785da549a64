/**
 * Megatron's arguments of a language model, read and written. What Megatron's models cannot differ in has an argument of our own
 * where it does differ, so that a checkpoint that is converted there and back is the same model.
 */

import * as v from "valibot";
import { hasGatedActivation } from "../../config/derive.ts";
import type { Field } from "../../config/field.ts";
import { hasLayer } from "../../config/hybrid-pattern.ts";
import { elasticKeys } from "../../config/keys/elastic.ts";
import { linearAttentionDefaults } from "../../config/keys/mamba.ts";
import { ropeScalingDefaults, yarnKeys } from "../../config/keys/model.ts";
import { camelCase } from "../../config/names.ts";
import { perLayerSizes } from "../../config/per-layer.ts";
import { type YarnValues, yarnOf } from "../../config/yarn.ts";
import { linearAttentionConfig } from "../../models/language/config.ts";
import { type ActivationFlag, activationKeys, flaggedActivations } from "../../native/activations.ts";
import { UserError } from "../../system/errors.ts";
import type { LanguageModelConfiguration } from "../hf/families/family.ts";
import type { Json } from "../native/manifest.ts";
import type { JsonObject } from "./common.ts";

const positionTypes = ["rope", "yarn", "learned_absolute"] as const;
/** More MTP depths than any model has. */
const MOST_DEPTHS = 64;
/** Taps of the convolution, a constant in Megatron's code. */
const megatronConvolutionTaps = 4;

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
	requireItsNorm({ hybridLayerPattern: pattern, applyLayernorm1p: args.apply_layernorm_1p === true });
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
		...activationKeys(flaggedActivations.find(([, { flag }]) => args[argumentOf(flag)] === true)?.[0] ?? null),
		activationFuncClampValue:
			typeof args.activation_func_clamp_value === "number" ? args.activation_func_clamp_value : null,
		gluLinearOffset: number("glu_linear_offset", 0),
		addBiasLinear: args.add_bias_linear === true,
		addQkvBias: args.add_qkv_bias === true,
		qkLayernorm: args.qk_layernorm === true,
		applyLayernorm1p: args.apply_layernorm_1p === true,
		attentionOutputGate: args.attention_output_gate === true,
		postLayernorm: args.post_layernorm === true,
		softmaxScale: typeof args.softmax_scale === "number" ? args.softmax_scale : null,
		embeddingMultiplier: number("embedding_multiplier", 1),
		embeddingPaddingIdx: typeof args.embedding_padding_idx === "number" ? args.embedding_padding_idx : null,
		softmaxType: args.softmax_type === "learnable" ? "learnable" : "vanilla",
		...latentAttentionOf(args, pattern),
		windowSize: Array.isArray(args.window_size) ? (args.window_size as number[]) : null,
		windowAttnSkipFreq: [args.window_attn_skip_freq ?? []].flat().length
			? ([args.window_attn_skip_freq].flat() as number[])
			: null,
		normalization: args.normalization === "LayerNorm" ? "LayerNorm" : "RMSNorm",
		// A hybrid model takes every other type for none.
		positionEmbeddingType: positionTypes.find((type) => type === args.position_embedding_type) ?? "none",
		rotaryBase: number("rotary_base", 10000),
		rotaryBaseLocal: number("rotary_base_local", 0) || null,
		rotaryPercent: number("rotary_percent", 1),
		rotarySeqLenInterpolationFactor: number("rotary_seq_len_interpolation_factor", 0) || null,
		...(keysFrom(yarnNames, args) as unknown as YarnValues),
		useRopeScaling: args.use_rope_scaling === true,
		ropeScalingFactor: number("rope_scaling_factor", ropeScalingDefaults.factor),
		ropeScalingLowFreqFactor: number("rope_scaling_low_freq_factor", ropeScalingDefaults.lowFreqFactor),
		ropeScalingHighFreqFactor: number("rope_scaling_high_freq_factor", ropeScalingDefaults.highFreqFactor),
		ropeScalingOriginalMaxPositionEmbeddings: number(
			"rope_scaling_original_max_position_embeddings",
			ropeScalingDefaults.originalMaxPositionEmbeddings,
		),
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
		mambaConvKernelDim: number("mamba_conv_kernel_dim", megatronConvolutionTaps),
		mambaChunkSize: 128,
		linearConvKernelDim: number("linear_conv_kernel_dim", linearAttentionDefaults.convKernelDim),
		linearKeyHeadDim: number("linear_key_head_dim", linearAttentionDefaults.keyHeadDim),
		linearValueHeadDim: number("linear_value_head_dim", linearAttentionDefaults.valueHeadDim),
		linearNumKeyHeads: number("linear_num_key_heads", linearAttentionDefaults.numKeyHeads),
		linearNumValueHeads: number("linear_num_value_heads", linearAttentionDefaults.numValueHeads),
		numExperts: number("num_experts", 0),
		moeRouterTopk: number("moe_router_topk", 2),
		moeFfnHiddenSize: number("moe_ffn_hidden_size", ffn),
		moeLatentSize: typeof args.moe_latent_size === "number" ? args.moe_latent_size : null,
		moeSharedExpertIntermediateSize: number("moe_shared_expert_intermediate_size", 0),
		moeSharedExpertGate: args.moe_shared_expert_gate === true,
		...([args.moe_router_load_balancing_type].flat().includes("sinkhorn") && {
			moeRouterLoadBalancingType: ["sinkhorn"],
		}),
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

/** Multi-latent attention from Megatron's arguments, whose rotary embedding turns neighbouring columns there. */
function latentAttentionOf(args: JsonObject, pattern: string): Partial<LanguageModelConfiguration> {
	if (!hasLayer(pattern, "latentAttention")) return { rotaryInterleaved: args.rotary_interleaved === true };
	const number = (name: string, missing: number) => (typeof args[name] === "number" ? (args[name] as number) : missing);
	const epsilon = number("layernorm_epsilon", number("norm_epsilon", 1e-5));
	return {
		qLoraRank: typeof args.q_lora_rank === "number" ? args.q_lora_rank : null,
		kvLoraRank: number("kv_lora_rank", 512),
		qkHeadDim: number("qk_head_dim", 128),
		qkPosEmbHeadDim: number("qk_pos_emb_head_dim", 64),
		vHeadDim: number("v_head_dim", 128),
		latentNormEpsilon: number("latent_norm_epsilon", epsilon),
		rotaryInterleaved: args.latent_rotary_interleaved !== false,
		ropeType: args.rope_type === "rope" ? "rope" : "yarn",
	};
}

/** Megatron's arguments of multi-latent attention. */
function latentArguments(configuration: LanguageModelConfiguration): JsonObject {
	const { hybridLayerPattern, latentNormEpsilon, normEpsilon, rotaryInterleaved } = configuration;
	if (!hasLayer(hybridLayerPattern, "latentAttention")) return rotaryInterleaved ? { rotary_interleaved: true } : {};
	return {
		multi_latent_attention: true,
		q_lora_rank: configuration.qLoraRank ?? null,
		kv_lora_rank: configuration.kvLoraRank!,
		qk_head_dim: configuration.qkHeadDim!,
		qk_pos_emb_head_dim: configuration.qkPosEmbHeadDim!,
		v_head_dim: configuration.vHeadDim!,
		rope_type: configuration.ropeType ?? "yarn",
		rotary_base: configuration.rotaryBase,
		...(configuration.ropeType !== "rope" && argumentsFrom(yarnNames, yarnOf(configuration) as unknown as JsonObject)),
		...(latentNormEpsilon !== undefined &&
			latentNormEpsilon !== normEpsilon && { latent_norm_epsilon: latentNormEpsilon }),
		...(rotaryInterleaved === false && { latent_rotary_interleaved: false }),
	};
}

/** Megatron's arguments about multi-token prediction; the pattern has its layers. */
function mtpArguments(configuration: LanguageModelConfiguration): JsonObject {
	const depths = configuration.hybridLayerPattern.split("/").length - 1;
	if (depths === 0) return {};
	return {
		mtp_num_layers: depths,
		mtp_loss_scaling_factor: configuration.mtpLossScalingFactor ?? 0.1,
		mtp_use_repeated_layer: configuration.mtpUseRepeatedLayer ?? false,
	};
}

/**
 * Sizes that Megatron's models do not have, under names as its arguments have them: lists of layers with sizes of their own,
 * and a convolution that is not as wide as Megatron's constant.
 */
function ownSizeArguments(configuration: LanguageModelConfiguration): JsonObject {
	const lists = perLayerSizes.map(({ list, key }) => [key.replaceAll("-", "_"), configuration[list] ?? null] as const);
	const { mambaConvKernelDim: taps } = configuration;
	return {
		...Object.fromEntries(lists.filter(([, sizes]) => sizes !== null)),
		...(taps !== megatronConvolutionTaps && { mamba_conv_kernel_dim: taps }),
	};
}

/** Megatron's arguments of Gated DeltaNet. */
function gatedDeltaArguments(configuration: LanguageModelConfiguration): JsonObject {
	if (!hasLayer(configuration.hybridLayerPattern, "gdn")) return {};
	requireItsNorm(configuration);
	const { keyHeads, keyDim, valueHeads, valueDim, convKernel } = linearAttentionConfig(configuration);
	return {
		experimental_attention_variant: "gated_delta_net",
		...{ linear_conv_kernel_dim: convKernel, linear_key_head_dim: keyDim, linear_value_head_dim: valueDim },
		...{ linear_num_key_heads: keyHeads, linear_num_value_heads: valueHeads },
	};
}

/** Throws a UserError for Gated DeltaNet whose own norm Megatron stores as another tensor. */
function requireItsNorm(c: Pick<LanguageModelConfiguration, "hybridLayerPattern" | "applyLayernorm1p">): void {
	if (!c.applyLayernorm1p || !hasLayer(c.hybridLayerPattern, "gdn")) return;
	throw new UserError(
		"With apply-layernorm-1p Megatron stores the norm inside Gated DeltaNet minus 1; such torch_dist checkpoints are not converted.",
	);
}

/** Megatron's arguments of rotary positions. */
function positionArguments(configuration: LanguageModelConfiguration): JsonObject {
	const { positionEmbeddingType, rotaryBase, rotaryPercent } = configuration;
	return {
		position_embedding_type: positionEmbeddingType,
		...(["rope", "yarn"].includes(positionEmbeddingType) && { rotary_base: rotaryBase, rotary_percent: rotaryPercent }),
		...(configuration.rotaryBaseLocal && { rotary_base_local: configuration.rotaryBaseLocal }),
		...(configuration.rotarySeqLenInterpolationFactor != null && {
			rotary_seq_len_interpolation_factor: configuration.rotarySeqLenInterpolationFactor,
		}),
		...(positionEmbeddingType === "yarn" && argumentsFrom(yarnNames, yarnOf(configuration) as unknown as JsonObject)),
		...(configuration.useRopeScaling && {
			use_rope_scaling: true,
			rope_scaling_factor: configuration.ropeScalingFactor,
			rope_scaling_low_freq_factor: configuration.ropeScalingLowFreqFactor,
			rope_scaling_high_freq_factor: configuration.ropeScalingHighFreqFactor,
			rope_scaling_original_max_position_embeddings: configuration.ropeScalingOriginalMaxPositionEmbeddings,
		}),
		add_position_embedding: true,
	};
}

/** Megatron's arguments of windows: a number for every n-th layer, or a list of layers. */
function windowArguments({ windowSize, windowAttnSkipFreq: skip }: LanguageModelConfiguration): JsonObject {
	if (!windowSize) return {};
	return { window_size: windowSize, ...(skip && { window_attn_skip_freq: skip.length === 1 ? skip[0] : skip }) };
}

/** Megatron's arguments of experts; a router without groups has none of theirs. */
function expertArguments(configuration: LanguageModelConfiguration): JsonObject {
	if (!hasLayer(configuration.hybridLayerPattern, "moe")) return {};
	return {
		num_experts: configuration.numExperts,
		moe_router_topk: configuration.moeRouterTopk,
		moe_ffn_hidden_size: configuration.moeFfnHiddenSize,
		...(configuration.moeLatentSize != null && { moe_latent_size: configuration.moeLatentSize }),
		moe_shared_expert_intermediate_size: configuration.moeSharedExpertIntermediateSize,
		...(configuration.moeSharedExpertGate && { moe_shared_expert_gate: true }),
		...(configuration.moeRouterLoadBalancingType?.includes("sinkhorn") && {
			moe_router_load_balancing_type: "sinkhorn",
		}),
		moe_router_score_function: configuration.moeRouterScoreFunction,
		moe_router_pre_softmax: configuration.moeRouterPreSoftmax,
		moe_router_enable_expert_bias: configuration.moeRouterEnableExpertBias,
		moe_router_topk_scaling_factor: configuration.moeRouterTopkScalingFactor,
		...(configuration.moeRouterNumGroups > 1 && {
			moe_router_num_groups: configuration.moeRouterNumGroups,
			moe_router_group_topk: configuration.moeRouterGroupTopk,
		}),
	};
}

/** Name of an activation's argument in Megatron. */
function argumentOf(flag: ActivationFlag): string {
	return flag.replaceAll("-", "_");
}

// Arguments that have the names of this program's keys.

interface NamedArgument {
	readonly argument: string;
	readonly property: string;
	readonly schema: v.GenericSchema;
	readonly standing: Json;
}

function namesOf(keys: Readonly<Record<string, Field>>): readonly NamedArgument[] {
	return Object.entries(keys).map(([key, { type, default: standing }]) => ({
		argument: key.replaceAll("-", "_"),
		property: camelCase(key),
		schema: type.schema,
		standing: standing as Json,
	}));
}

const elasticNames = namesOf(elasticKeys);
const yarnNames = namesOf(yarnKeys);

/** Keys by arguments; absent ones have their defaults. */
function keysFrom(names: readonly NamedArgument[], args: JsonObject): JsonObject {
	return Object.fromEntries(
		names.map(({ argument, property, schema, standing }) => {
			const value = args[argument];
			return [property, value === undefined || !v.is(schema, value) ? standing : value] as const;
		}),
	);
}

function argumentsFrom(names: readonly NamedArgument[], model: JsonObject): JsonObject {
	const known = names.flatMap(({ argument, property }) => {
		const value = model[property];
		return value === undefined ? [] : [[argument, value] as const];
	});
	return Object.fromEntries(known);
}

/** An elastic model's keys by Megatron's arguments. Where sizes are given, Megatron's shares are its default. */
export function elasticFromArguments(args: JsonObject): JsonObject {
	const shares = (name: string) => name.endsWith("_per_list") && Array.isArray(args[name.replace("_per_", "_int_")]);
	return keysFrom(elasticNames, Object.fromEntries(Object.entries(args).filter(([name]) => !shares(name))));
}

/** Megatron's arguments of an elastic model; none of another one. */
export function elasticArguments(model: JsonObject): JsonObject {
	return model.flextron === true ? argumentsFrom(elasticNames, model) : {};
}

/** The arguments that Megatron's loader compares, for a model that was never run by it. */
export function argumentsOf(configuration: LanguageModelConfiguration, paddedVocabularySize: number): JsonObject {
	return {
		tensor_model_parallel_size: 1,
		pipeline_model_parallel_size: 1,
		num_layers: configuration.numLayers,
		...mtpArguments(configuration),
		hidden_size: configuration.hiddenSize,
		ffn_hidden_size: configuration.ffnHiddenSize,
		num_attention_heads: configuration.numAttentionHeads,
		group_query_attention: true,
		num_query_groups: configuration.numQueryGroups,
		kv_channels: configuration.kvChannels,
		hybrid_layer_pattern: configuration.hybridLayerPattern,
		...Object.fromEntries(flaggedActivations.map(([name, { flag }]) => [argumentOf(flag), configuration[name]])),
		gated_linear_unit: hasGatedActivation(configuration),
		activation_func_clamp_value: configuration.activationFuncClampValue ?? null,
		glu_linear_offset: configuration.gluLinearOffset ?? 0,
		add_bias_linear: configuration.addBiasLinear ?? false,
		...(configuration.addQkvBias && { add_qkv_bias: true }),
		...(configuration.qkLayernorm && { qk_layernorm: true }),
		...(configuration.applyLayernorm1p && { apply_layernorm_1p: true }),
		...(configuration.attentionOutputGate && { attention_output_gate: true }),
		...gatedDeltaArguments(configuration),
		...(configuration.postLayernorm && { post_layernorm: true }),
		...(configuration.softmaxScale && { softmax_scale: configuration.softmaxScale }),
		...((configuration.embeddingMultiplier ?? 1) !== 1 && { embedding_multiplier: configuration.embeddingMultiplier }),
		...(configuration.embeddingPaddingIdx != null && { embedding_padding_idx: configuration.embeddingPaddingIdx }),
		...(configuration.softmaxType === "learnable" && { softmax_type: "learnable" }),
		...latentArguments(configuration),
		...windowArguments(configuration),
		normalization: configuration.normalization ?? "RMSNorm",
		layernorm_epsilon: configuration.normEpsilon,
		init_method_std: configuration.initMethodStd,
		hidden_dropout: configuration.hiddenDropout,
		attention_dropout: configuration.attentionDropout,
		mamba_num_heads: configuration.mambaNumHeads,
		mamba_head_dim: configuration.mambaHeadDim,
		mamba_num_groups: configuration.mambaNumGroups,
		mamba_state_dim: configuration.mambaStateDim,
		...expertArguments(configuration),
		...ownSizeArguments(configuration),
		untie_embeddings_and_output_weights: configuration.untieEmbeddingsAndOutputWeights,
		...positionArguments(configuration),
		max_position_embeddings: configuration.maxPositionEmbeddings,
		vocab_size: configuration.vocabSize,
		padded_vocab_size: paddedVocabularySize,
		consumed_train_samples: 0,
		consumed_valid_samples: 0,
	};
}
