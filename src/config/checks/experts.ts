/** Checks of mixtures of experts: routing, activation, FP8 products. */

import { activationsThat } from "../../native/activations.ts";
import { hasGatedActivation } from "../derive.ts";
import { expertLayerOf, fusedMlpObstacle } from "../fused-mlp.ts";
import { hasLayer } from "../hybrid-pattern.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

const expertWidths = (c: TrainingConfiguration) => [
	...new Set([c.moeFfnHiddenSize, ...(c.moeFfnHiddenSizePerLayer ?? [])]),
];

const roundsExperts = (c: TrainingConfiguration) => c.fp8Modules.includes("experts");

/** Conditions that FP8 products need beside fp8-format. */
const fp8Needs: readonly (readonly [what: string, holds: (c: TrainingConfiguration) => boolean])[] = [
	[
		"layers of experts (E), or fp8-modules projections",
		(c) => !roundsExperts(c) || hasLayer(c.hybridLayerPattern, "moe"),
	],
	["fp8-recipe blockwise", (c) => c.fp8Recipe === "blockwise"],
	["bf16, or fp8-emulate", (c) => c.bf16 || c.fp8Emulate],
	[
		"device cuda (Hopper), or device cpu with fp8-emulate",
		(c) => (c.fp8Emulate ? c.device === "cpu" : c.device === "cuda"),
	],
	[
		"hidden-size, or moe-latent-size, and moe-ffn-hidden-size in steps of 16 on device cuda",
		(c) =>
			c.device !== "cuda" ||
			!roundsExperts(c) ||
			[c.moeLatentSize ?? c.hiddenSize, ...expertWidths(c)].every((width) => width % 16 === 0),
	],
];

const hasSinkhorn = (c: TrainingConfiguration) => c.moeRouterLoadBalancingType.includes("sinkhorn");

/** Refuses what Sinkhorn's routing has no use for, as in Megatron. */
function withoutSinkhorn(key: Key, allowed: string, holds: (c: TrainingConfiguration) => boolean): Check {
	return (c) =>
		unless(!hasSinkhorn(c) || holds(c), key, `allowed with moe-router-load-balancing-type sinkhorn is ${allowed}`);
}

/** Why the experts cannot be one fused operation, as the end of "… and"; null: they can. */
function notFused(c: TrainingConfiguration): string | null {
	return c.moeFusedMlp === "off" ? "moe-fused-mlp is off" : fusedMlpObstacle(expertLayerOf(c));
}

const fp8Checks: readonly Check[] = [
	...fp8Needs.map(
		([what, holds]): Check =>
			(c) =>
				unless(c.fp8Format === null || holds(c), "fp8-format", `it needs ${what}`),
	),
	(c) =>
		unless(
			c.fp8Format === null || !roundsExperts(c) || notFused(c) === null,
			"fp8-format",
			`it needs experts as one operation, and ${notFused(c)}`,
		),
	(c) => unless(c.fp8Recipe === null || c.fp8Format !== null, "fp8-recipe", "it needs fp8-format"),
	(c) => unless(!c.fp8Wgrad || c.fp8Format !== null, "fp8-wgrad", "it needs fp8-format"),
	(c) => unless(!c.fp8Wgrad || roundsExperts(c), "fp8-wgrad", "it needs fp8-modules experts"),
	(c) => unless(c.fp8Format !== null || !c.fp8Modules.includes("projections"), "fp8-modules", "it needs fp8-format"),
	(c) => unless(!c.fp8Emulate || c.fp8Format !== null, "fp8-emulate", "it needs fp8-format"),
];

const routingChecks: readonly Check[] = [
	(c) =>
		unless(
			!hasLayer(c.hybridLayerPattern, "moe") || c.numExperts > 0,
			"num-experts",
			"allowed is at least 1 when the pattern has E",
		),
	(c) =>
		unless(
			c.numExperts === 0 || c.moeRouterTopk <= c.numExperts,
			"moe-router-topk",
			`allowed is at most num-experts (${c.numExperts})`,
		),
	(c) =>
		unless(
			c.moeLatentSize === null || hasLayer(c.hybridLayerPattern, "moe"),
			"moe-latent-size",
			"allowed only with a mixture of experts (E) in hybrid-layer-pattern",
		),
	(c) =>
		unless(
			!c.moeSharedExpertGate || (c.moeSharedExpertIntermediateSize > 0 && hasLayer(c.hybridLayerPattern, "moe")),
			"moe-shared-expert-gate",
			"allowed only with moe-shared-expert-intermediate-size",
		),
	// As in Megatron: the softmax of a single score is 1 for any logit.
	(c) =>
		unless(
			!hasLayer(c.hybridLayerPattern, "moe") ||
				c.moeRouterTopk > 1 ||
				hasSinkhorn(c) ||
				c.moeRouterScoreFunction !== "softmax" ||
				c.moeRouterPreSoftmax,
			"moe-router-topk",
			"allowed with moe-router-score-function softmax is at least 2, or 1 with moe-router-pre-softmax: without it the only expert's weight is always 1 and the router does not learn",
		),
	(c) =>
		unless(
			c.numExperts % c.moeRouterNumGroups === 0,
			"moe-router-num-groups",
			`allowed is a divisor of num-experts (${c.numExperts})`,
		),
	(c) =>
		unless(
			c.moeRouterGroupTopk <= c.moeRouterNumGroups,
			"moe-router-group-topk",
			`allowed is at most moe-router-num-groups (${c.moeRouterNumGroups})`,
		),
	(c) =>
		unless(
			c.numExperts === 0 ||
				c.moeRouterNumGroups === 1 ||
				(c.moeRouterTopk % c.moeRouterGroupTopk === 0 &&
					c.moeRouterTopk <= (c.moeRouterGroupTopk * c.numExperts) / c.moeRouterNumGroups),
			"moe-router-topk",
			"allowed is a multiple of moe-router-group-topk that its groups of experts can hold",
		),
	(c) =>
		unless(
			!c.moeRouterEnableExpertBias || c.moeRouterScoreFunction === "sigmoid",
			"moe-router-enable-expert-bias",
			"allowed is false unless moe-router-score-function is sigmoid",
		),
	(c) =>
		unless(
			!c.moeRouterForceLoadBalancing || hasLayer(c.hybridLayerPattern, "moe"),
			"moe-router-force-load-balancing",
			"allowed only with a mixture of experts (E) in hybrid-layer-pattern",
		),
	(c) =>
		unless(
			c.moeAuxLossCoeff.length === c.moeRouterLoadBalancingType.length,
			"moe-aux-loss-coeff",
			`allowed is one coefficient for each of ${c.moeRouterLoadBalancingType.join(", ")}`,
		),
	(c) => {
		const types = c.moeRouterLoadBalancingType;
		return unless(
			new Set(types).size === types.length &&
				(types.length === 1 || !(types.includes("none") || types.includes("sinkhorn"))),
			"moe-router-load-balancing-type",
			"allowed is each loss once, and none or sinkhorn only alone",
		);
	},
	withoutSinkhorn("moe-aux-loss-coeff", "0", (c) => c.moeAuxLossCoeff[0] === 0),
	withoutSinkhorn("moe-router-enable-expert-bias", "false", (c) => !c.moeRouterEnableExpertBias),
	withoutSinkhorn("moe-router-num-groups", "1", (c) => c.moeRouterNumGroups === 1),
	withoutSinkhorn("moe-router-topk-scaling-factor", "1", (c) => c.moeRouterTopkScalingFactor === 1),
	withoutSinkhorn("flextron", "false", (c) => !c.flextron),
	(c) =>
		unless(
			!c.moeRouterLoadBalancingType.includes("pooled_aux_loss") || c.numExpertsPerLayer === null,
			"moe-router-load-balancing-type",
			"allowed with num-experts-per-layer are losses of single layers: pooled_aux_loss adds up the layers' counts of an expert",
		),
	(c) =>
		unless(
			!c.addBiasLinear || !hasLayer(c.hybridLayerPattern, "moe") || c.moeSharedExpertIntermediateSize === 0,
			"add-bias-linear",
			"allowed is false with moe-shared-expert-intermediate-size: shared experts have no biases in Megatron",
		),
	(c) => {
		const obstacle = fusedMlpObstacle(expertLayerOf(c));
		return unless(c.moeFusedMlp !== "on" || obstacle === null, "moe-fused-mlp", `allowed is auto or off: ${obstacle}`);
	},
	(c) =>
		unless(!c.moeSingleGroupedBias || c.addBiasLinear, "moe-single-grouped-bias", "allowed only with add-bias-linear"),
	(c) =>
		unless(
			c.moeMlpGluInterleaveSize === null ||
				(hasGatedActivation(c) && expertWidths(c).every((width) => width % c.moeMlpGluInterleaveSize! === 0)),
			"moe-mlp-glu-interleave-size",
			`allowed only with ${activationsThat("gated")}, and a divisor of moe-ffn-hidden-size (${expertWidths(c).join(", ")})`,
		),
];

export const expertChecks: readonly Check[] = [...routingChecks, ...fp8Checks];
