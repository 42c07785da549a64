/** Checks of the keys of recomputation and of offloading. */

import { hasLayer } from "../hybrid-pattern.ts";
import { defaultRecomputeModules, recomputeModules } from "../recompute-modules.ts";
import type { TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

const modulesOf = (c: TrainingConfiguration) => c.recomputeModules ?? defaultRecomputeModules;
const selective = (c: TrainingConfiguration) => c.recomputeGranularity === "selective";

export const recomputeChecks: readonly Check[] = [
	(c) =>
		unless(
			c.recomputeModules === null || selective(c),
			"recompute-modules",
			"allowed only with recompute-granularity selective",
		),
	(c) =>
		unless(
			!selective(c) || modulesOf(c).some((module) => exists(module, c)),
			"recompute-modules",
			`allowed is a module that a layer of ${c.hybridLayerPattern} has, and ${absent(modulesOf(c))}`,
		),
	(c) =>
		unless(
			!selective(c) || c.recomputeMethod === "uniform",
			"recompute-method",
			"allowed only with recompute-granularity full",
		),
	(c) =>
		unless(
			!selective(c) || c.recomputeNumLayers === 1,
			"recompute-num-layers",
			"allowed only with recompute-granularity full",
		),
	(c) =>
		unless(
			!c.overlapMoeExpertParallelComm || c.recomputeGranularity !== "full",
			"overlap-moe-expert-parallel-comm",
			"allowed without recompute-granularity full, which runs a block's nodes as one",
		),
	(c) =>
		unless(
			!c.overlapMoeExpertParallelComm || !selective(c) || !modulesOf(c).includes("moe"),
			"overlap-moe-expert-parallel-comm",
			"allowed without moe among recompute-modules, which runs an expert layer's nodes as one",
		),
	(c) =>
		unless(
			(c.offloadModules !== null) === c.fineGrainedActivationOffloading,
			"offload-modules",
			"needed with fine-grained-activation-offloading, and allowed only with it",
		),
	(c) =>
		unless(
			!c.fineGrainedActivationOffloading || hasLayer(c.hybridLayerPattern, "moe"),
			"fine-grained-activation-offloading",
			`allowed in models with experts, and ${c.hybridLayerPattern} has none`,
		),
	(c) =>
		unless(
			!c.fineGrainedActivationOffloading || !(selective(c) ? modulesOf(c).includes("moe") : c.recomputeGranularity),
			"fine-grained-activation-offloading",
			"allowed without recompute-granularity full and without moe among recompute-modules, which keep nothing of experts",
		),
];

function absent(modules: readonly string[]): string {
	return modules.length === 1 ? `${modules[0]} is a part of none` : `${modules.join(" and ")} are parts of none`;
}

/** Whether any layer has the part. */
function exists(module: keyof typeof recomputeModules, c: TrainingConfiguration): boolean {
	const { layers } = recomputeModules[module];
	const inPattern = hasLayer(c.hybridLayerPattern, ...layers);
	return inPattern && (module !== "shared_experts" || c.moeSharedExpertIntermediateSize > 0);
}
