/** Checks of the keys of low-rank adapters. */

import { hasLayer } from "../hybrid-pattern.ts";
import type { LoraModule } from "../keys/lora.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Whether any layer has the projection. */
const exists: Readonly<Record<LoraModule, (c: TrainingConfiguration) => boolean>> = {
	linear_qkv: (c) => hasLayer(c.hybridLayerPattern, "attention"),
	linear_proj: (c) => hasLayer(c.hybridLayerPattern, "attention"),
	linear_fc1: hasFeedForward,
	linear_fc2: hasFeedForward,
	in_proj: (c) => hasLayer(c.hybridLayerPattern, "mamba"),
	out_proj: (c) => hasLayer(c.hybridLayerPattern, "mamba"),
	"experts.linear_fc1": (c) => hasLayer(c.hybridLayerPattern, "moe"),
	"experts.linear_fc2": (c) => hasLayer(c.hybridLayerPattern, "moe"),
};

function hasFeedForward({ hybridLayerPattern: pattern, moeSharedExpertIntermediateSize }: TrainingConfiguration) {
	return hasLayer(pattern, "mlp") || (hasLayer(pattern, "moe") && moeSharedExpertIntermediateSize > 0);
}

const targetsExperts = (c: TrainingConfiguration) =>
	c.loraRank !== null && c.loraTargetModules.some((module) => module.startsWith("experts."));

/** Refuses a given key without lora-rank. */
function needsRank(key: Key, given: (c: TrainingConfiguration) => boolean): Check {
	return (c) => unless(!given(c) || c.loraRank !== null, key, "it needs lora-rank");
}

export const loraChecks: readonly Check[] = [
	needsRank("lora-dropout", (c) => c.loraDropout > 0),
	needsRank("save-peft", (c) => c.savePeft !== null),
	(c) =>
		unless(c.loraRank === null || !c.freezeLm, "freeze-lm", "allowed is false with lora-rank, whose adapters train"),
	(c) =>
		unless(
			c.loraRank === null || c.loraTargetModules.some((module) => exists[module](c)),
			"lora-target-modules",
			`allowed is a projection that a layer of ${c.hybridLayerPattern} has`,
		),
	(c) =>
		unless(
			!targetsExperts(c) || c.llmExptTp === 1,
			"lora-target-modules",
			`allowed are projections of routed experts only with llm-expt-tp 1, and it is ${c.llmExptTp}`,
		),
	(c) =>
		unless(
			!targetsExperts(c) || c.loraDropout === 0,
			"lora-dropout",
			"allowed is 0 where routed experts have adapters: their rows have no place among the tokens",
		),
];
