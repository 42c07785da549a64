/**
 * Experts as DeepSeek-V3 and GLM-4.5 have them: a sigmoid router of groups with a bias for the choice, a shared expert, first layers
 * dense, layers of multi-token prediction behind the last (docs/spec/families.md §2.4; routing as in docs/spec/language-model.md §4).
 */

import type { LayerKind } from "../../../config/hybrid-pattern.ts";
import { count, fraction, type Json, type LanguageModelConfiguration, type Refuse, whole } from "./family.ts";

/** Whether a layer has experts; `values`: with the family's defaults, here and below. */
export const hasExperts = (values: Json, layer: number) => layer >= Number(values.first_k_dense_replace);

/** `missing`: the family's layers where config.json has no number of them. */
export const layersAhead = (missing: number) => ({
	field: "num_nextn_predict_layers",
	depthOf:
		({ num_hidden_layers: layers = missing }: Json) =>
		(name: string) => {
			const index = Number(/^model\.layers\.(\d+)\./.exec(name)?.[1] ?? -1);
			return index >= Number(layers) ? index - Number(layers) : null;
		},
	most: 64,
	places: (base: string, index: number) => ({
		own: `${base}layers.${index}.`,
		layer: `${base}layers.${index}.`,
		names: { enorm: "enorm", hnorm: "hnorm", eh_proj: "eh_proj", final_layernorm: "shared_head.norm" },
	}),
});

/** Nothing for a model without experts. */
export function readExperts(values: Json, bad: Refuse, layers: number): Partial<LanguageModelConfiguration> {
	const dense = count(values, "first_k_dense_replace", 0, bad);
	if (dense >= layers && count(values, "num_nextn_predict_layers", 0, bad) === 0) return {};
	const [numExperts, topk] = [whole(values, "n_routed_experts", 1, bad), whole(values, "num_experts_per_tok", 1, bad)];
	const [groups, kept] = [whole(values, "n_group", 1, bad), whole(values, "topk_group", 1, bad)];
	const width = whole(values, "moe_intermediate_size", 1, bad);
	// As in Megatron, the scores of the chosen experts are normalised unless only one is chosen.
	const { norm_topk_prob: normalised = true } = values;
	if (normalised !== topk > 1) {
		bad(
			`norm_topk_prob is ${JSON.stringify(normalised)} where num_experts_per_tok is ${topk}, this program's model has only ${topk > 1} there`,
		);
	}
	if (numExperts % groups !== 0) bad(`n_routed_experts is ${numExperts}, no multiple of n_group (${groups})`);
	if (kept < groups && Math.floor(topk / kept) !== 2) {
		bad(
			`num_experts_per_tok is ${topk} and topk_group ${kept}: transformers scores a group by its two best experts, this ` +
				"program, as Megatron, by num_experts_per_tok / topk_group of them, which has to be 2 too",
		);
	}
	return {
		...{ numExperts, moeRouterTopk: topk, moeFfnHiddenSize: width },
		...{ moeRouterNumGroups: groups, moeRouterGroupTopk: kept },
		moeSharedExpertIntermediateSize: count(values, "n_shared_experts", 1, bad) * width,
		moeRouterScoreFunction: "sigmoid",
		moeRouterEnableExpertBias: true,
		moeRouterTopkScalingFactor: fraction(values, "routed_scaling_factor", 1, bad),
	};
}

/** `kinds`: of every layer's second block. */
export function writtenExperts(c: LanguageModelConfiguration, kinds: readonly LayerKind[]): Json {
	const first = kinds.indexOf("moe");
	return {
		...(first >= 0 && {
			...{ n_routed_experts: c.numExperts, num_experts_per_tok: c.moeRouterTopk },
			...{ moe_intermediate_size: c.moeFfnHiddenSize, n_group: c.moeRouterNumGroups, topk_group: c.moeRouterGroupTopk },
		}),
		first_k_dense_replace: first < 0 ? kinds.length : first,
		n_shared_experts: Math.floor(c.moeSharedExpertIntermediateSize / c.moeFfnHiddenSize),
		norm_topk_prob: c.moeRouterTopk > 1,
		routed_scaling_factor: c.moeRouterTopkScalingFactor,
	};
}
