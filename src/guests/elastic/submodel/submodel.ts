/**
 * Submodels of an elastic parent: along every axis they keep the parent's first units, so that a smaller one is part of
 * every larger one (docs/spec/elastic.md §1). Kept are embedding channels [0, hiddenSize), experts [0, experts) and their
 * channels [0, width), of every Mamba group its first heads / groups heads, and of every query group its first
 * heads / groups query heads.
 */
import type { LayerKind } from "../../../config/hybrid-pattern.ts";
import { configOfLayer, type HybridConfig } from "../../../models/language/config.ts";

/** Sizes of one submodel of a nested family: the first units of every axis of the parent are kept. */
export interface Submodel {
	readonly hiddenSize: number;
	/** One per Mamba layer, in order. */
	readonly mambaNumHeads: readonly number[];
	/** One per MoE layer: channels of a routed expert. */
	readonly moeFfnHiddenSize: readonly number[];
	/** One per MoE layer. */
	readonly numMoeExperts: readonly number[];
	/** One per attention layer. */
	readonly numAttentionHeads: readonly number[];
	/** One per layer of the main part. */
	readonly keptLayers: readonly boolean[];
}

/** The parent as its own largest submodel. Layers of MTP depths are in none. */
export function parentSubmodel(config: HybridConfig): Submodel {
	const { pattern, hiddenSize } = config;
	const everyLayer = (kind: LayerKind, size: (layer: HybridConfig) => number) =>
		pattern.flatMap((layer, index) => (layer === kind ? [size(configOfLayer(config, index))] : []));
	return {
		hiddenSize,
		mambaNumHeads: everyLayer("mamba", ({ mamba }) => mamba.heads),
		moeFfnHiddenSize: everyLayer("moe", ({ moe }) => moe.ffnHiddenSize),
		numMoeExperts: everyLayer("moe", ({ moe }) => moe.experts),
		numAttentionHeads: everyLayer("attention", ({ attention }) => attention.heads),
		keptLayers: pattern.map(() => true),
	};
}
