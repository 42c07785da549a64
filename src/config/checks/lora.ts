/** Checks of the keys of low-rank adapters. */

import type { LoraModule } from "../keys/lora.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Whether any layer has the projection. */
const exists: Readonly<Record<LoraModule, (c: TrainingConfiguration) => boolean>> = {
	linear_qkv: (c) => c.hybridLayerPattern.includes("*"),
	linear_proj: (c) => c.hybridLayerPattern.includes("*"),
	linear_fc1: hasFeedForward,
	linear_fc2: hasFeedForward,
	in_proj: (c) => c.hybridLayerPattern.includes("M"),
	out_proj: (c) => c.hybridLayerPattern.includes("M"),
	"experts.linear_fc1": (c) => c.hybridLayerPattern.includes("E"),
	"experts.linear_fc2": (c) => c.hybridLayerPattern.includes("E"),
};

function hasFeedForward({ hybridLayerPattern: pattern, moeSharedExpertIntermediateSize }: TrainingConfiguration) {
	return pattern.includes("-") || (pattern.includes("E") && moeSharedExpertIntermediateSize > 0);
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
