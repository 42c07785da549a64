/** Checks of the keys of multi-latent attention. */
import { hasLayer } from "../hybrid-pattern.ts";
import type { TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

const hasLatents = (c: TrainingConfiguration) => hasLayer(c.hybridLayerPattern, "latentAttention");

export const latentAttentionChecks: readonly Check[] = [
	(c) =>
		unless(
			c.multiLatentAttention === hasLatents(c),
			"multi-latent-attention",
			`allowed is ${hasLatents(c)} with the pattern ${c.hybridLayerPattern}, whose layers of it are +`,
		),
	(c) =>
		unless(
			!hasLatents(c) || c.numQueryGroups === c.numAttentionHeads,
			"num-query-groups",
			`allowed with + is num-attention-heads (${c.numAttentionHeads}): every head has its own keys and values`,
		),
	(c) => unless(c.qkPosEmbHeadDim % 2 === 0, "qk-pos-emb-head-dim", "allowed is an even number: pairs are rotated"),
	(c) =>
		unless(
			!hasLatents(c) || c.rotaryPercent === 1,
			"rotary-percent",
			"allowed with + is 1: qk-pos-emb-head-dim says it",
		),
	(c) => unless(!hasLatents(c) || c.windowSize === null, "window-size", "allowed only without +"),
	(c) => unless(!hasLatents(c) || !c.flextron, "hybrid-layer-pattern", "allowed with flextron is a pattern without +"),
];
