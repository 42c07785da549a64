/** Checks of lists with a size for every layer: the list's length, and the divisors that a size common to all has too. */

import { countLayers, layerSymbols, parseHybridPattern } from "../hybrid-pattern.ts";
import { type PerLayerSize, perLayerSizes } from "../per-layer.ts";
import type { TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** A divisor that every size of a list must have. */
type Condition = readonly [key: string, divisor: (c: TrainingConfiguration) => number];

/** Of numbers of heads. */
const parallelSizes: readonly Condition[] = [
	["llm-tp", (c) => c.llmTp],
	["llm-tp × llm-cp", (c) => (c.llmCp === 1 ? 1 : c.llmTp * c.llmCp)],
];

const conditions: Readonly<Record<PerLayerSize["list"], readonly Condition[]>> = {
	mambaNumHeadsPerLayer: [["mamba-num-groups", (c) => c.mambaNumGroups], ...parallelSizes],
	numAttentionHeadsPerLayer: [["num-query-groups", (c) => c.numQueryGroups], ...parallelSizes],
	numExpertsPerLayer: [
		["moe-router-num-groups", (c) => c.moeRouterNumGroups],
		["llm-ep", (c) => c.llmEp],
	],
	moeFfnHiddenSizePerLayer: [["llm-expt-tp", (c) => c.llmExptTp]],
};

export const perLayerChecks: readonly Check[] = perLayerSizes.flatMap(({ kind, list, key }): Check[] => [
	(c) => {
		const sizes = c[list];
		const layers = countLayers(parseHybridPattern(c.hybridLayerPattern), kind);
		return unless(
			sizes === null || sizes.length === layers,
			key,
			`allowed is a number for each of the ${layers} ${layerSymbols[kind]} of hybrid-layer-pattern's main part, and these are ${sizes?.length}`,
		);
	},
	...conditions[list].map(
		([name, divisor]): Check =>
			(c) => {
				const sizes = c[list];
				const wrong = sizes?.find((size) => size % divisor(c) !== 0);
				return unless(wrong === undefined, key, `allowed are multiples of ${name} (${divisor(c)}), not ${wrong}`);
			},
	),
	(c) => {
		if (list !== "numExpertsPerLayer") return null;
		// The groups that a token may use hold the experts it is sent to.
		const least = Math.ceil((c.moeRouterTopk * c.moeRouterNumGroups) / c.moeRouterGroupTopk);
		const wrong = c.numExpertsPerLayer?.find((size) => size < least);
		return unless(
			wrong === undefined,
			key,
			`allowed is at least ${least}, which moe-router-topk asks for, not ${wrong}`,
		);
	},
]);
