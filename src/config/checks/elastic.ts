/** Checks of the keys of elastic models (docs/spec/elastic.md §2); src/elastic checks the sizes themselves. */

import { hasLayer, parsePattern } from "../hybrid-pattern.ts";
import { perLayerSizes } from "../per-layer.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Refuses a given key without flextron. */
function needsFlextron(key: Key, given: (c: TrainingConfiguration) => boolean): Check {
	return (c) => unless(!given(c) || c.flextron, key, "it needs flextron");
}

const given: readonly (readonly [Key, (c: TrainingConfiguration) => boolean])[] = [
	["enable-router", (c) => c.enableRouter],
	["soft-mask", (c) => c.softMask],
	["emb-int-list", (c) => c.embIntList !== null],
	["emb-per-list", (c) => c.embPerList !== null],
	["mamba-int-list", (c) => c.mambaIntList !== null],
	["mamba-per-list", (c) => c.mambaPerList !== null],
	["mlp-int-list", (c) => c.mlpIntList !== null],
	["mlp-per-list", (c) => c.mlpPerList !== null],
	["moe-expert-int-list", (c) => c.moeExpertIntList !== null],
	["moe-expert-per-list", (c) => c.moeExpertPerList !== null],
	["head-int-list", (c) => c.headIntList !== null],
	["head-per-list", (c) => c.headPerList !== null],
	["add-skipping", (c) => c.addSkipping],
	["freeze-router", (c) => c.freezeRouter],
	["freeze-model", (c) => c.freezeModel],
	["is-flex-eval", (c) => c.isFlexEval],
	["flextron-compat", (c) => c.flextronCompat],
];

/** Settings that an elastic model cannot be combined with. */
const refused: readonly (readonly [Key, (c: TrainingConfiguration) => boolean, string])[] = [
	[
		"hybrid-layer-pattern",
		(c) => parsePattern(c.hybridLayerPattern).mtp !== null,
		"allowed with flextron is a pattern without multi-token prediction",
	],
	[
		"hybrid-layer-pattern",
		(c) => hasLayer(c.hybridLayerPattern, "gdn"),
		"allowed with flextron is a pattern without G, whose heads have no masks",
	],
	["lora-rank", (c) => c.loraRank !== null, "allowed only without flextron"],
	[
		"moe-router-score-function",
		(c) => c.softMask && hasLayer(c.hybridLayerPattern, "moe") && c.moeRouterScoreFunction !== "sigmoid",
		"allowed with soft-mask is sigmoid",
	],
	[
		"moe-router-load-balancing-type",
		(c) => c.moeRouterLoadBalancingType.includes("pooled_aux_loss"),
		"allowed with flextron are losses of single layers, whose submodels differ: not pooled_aux_loss",
	],
	["moe-shared-expert-gate", (c) => c.moeSharedExpertGate, "allowed only without flextron"],
	["moe-latent-size", (c) => c.moeLatentSize !== null, "allowed only without flextron"],
	["moe-z-loss-coeff", (c) => c.softMask && c.moeZLossCoeff > 0, "allowed with soft-mask is 0"],
	[
		"recompute-granularity",
		(c) => c.freezeModel && c.recomputeGranularity !== null,
		"allowed only without freeze-model, which leaves no weight to recompute for",
	],
	["add-bias-linear", (c) => c.addBiasLinear, "allowed with flextron is false: a mask cannot scale a bias away"],
	["add-attention-bias", (c) => c.addAttentionBias, "allowed with flextron is false: a mask cannot scale a bias away"],
	["add-qkv-bias", (c) => c.addQkvBias, "allowed with flextron is false: a mask cannot scale a bias away"],
	["normalization", (c) => c.normalization !== "RMSNorm", "allowed with flextron is RMSNorm"],
	[
		"position-embedding-type",
		(c) => c.positionEmbeddingType === "learned_absolute",
		"allowed with flextron is none, rope or yarn",
	],
	["qk-layernorm", (c) => c.qkLayernorm, "allowed with flextron is false: a norm of a masked head is no norm"],
	["post-layernorm", (c) => c.postLayernorm, "allowed only without flextron"],
	["apply-layernorm-1p", (c) => c.applyLayernorm1p, "allowed only without flextron"],
	["softmax-type", (c) => c.softmaxType !== "vanilla", "allowed with flextron is vanilla"],
	["attention-output-gate", (c) => c.attentionOutputGate, "allowed only without flextron"],
	["window-attn-skip-freq", (c) => c.windowAttnSkipFreq !== null, "allowed only without flextron"],
	["moe-mlp-glu-interleave-size", (c) => c.moeMlpGluInterleaveSize !== null, "allowed only without flextron"],
	...perLayerSizes.map(
		({ key, list }) =>
			[
				key,
				(c: TrainingConfiguration) => c[list] !== null,
				"allowed only without flextron: a parent's layers of a kind are alike",
			] as const,
	),
	["freeze-lm", (c) => c.freezeLm, "allowed with flextron is false; freeze-model freezes all but the router"],
	[
		"cuda-graph-impl",
		(c) => c.cudaGraphImpl !== "none",
		"allowed with flextron is none: masks change every microbatch",
	],
];

export const elasticChecks: readonly Check[] = [
	...given.map(([key, isGiven]) => needsFlextron(key, isGiven)),
	(c) => unless(!c.flextron || c.enableRouter, "flextron", "it needs enable-router"),
	...refused.map(
		([key, isGiven, message]): Check =>
			(c) =>
				unless(!c.flextron || !isGiven(c), key, message),
	),
	(c) => unless(!c.addSkipping || c.layerRankingList !== null, "add-skipping", "it needs layer-ranking-list"),
	(c) => unless(c.layerRankingList === null || c.addSkipping, "layer-ranking-list", "it needs add-skipping"),
	(c) =>
		unless(
			c.budgetProbs === null || c.budgetProbs.length === c.budgetList.length,
			"budget-probs",
			`allowed is one number for each of budget-list (${c.budgetList.length})`,
		),
	(c) =>
		unless(
			c.budgetProbs === null || c.budgetProbs.some((probability) => probability > 0),
			"budget-probs",
			"allowed are numbers of which one is greater than 0",
		),
	(c) => unless(new Set(c.budgetList).size === c.budgetList.length, "budget-list", "allowed is each budget once"),
	(c) =>
		unless(
			!c.flextron || c.budgetType !== "param" || c.budgetList.every((budget) => budget <= 1),
			"budget-list",
			"allowed with budget-type param are shares of at most 1",
		),
	(c) => unless(c.overrideSelectedBudget === null || c.isFlexEval, "override-selected-budget", "it needs is-flex-eval"),
	(c) =>
		unless(!c.isFlexEval || c.overrideSelectedBudget !== null, "is-flex-eval", "it needs override-selected-budget"),
	(c) => unless(!(c.freezeRouter && c.freezeModel), "freeze-model", "allowed is one of freeze-router and freeze-model"),
];
