/** Checks of the keys of low-rank adapters. */
import { hasEncoder } from "../derive.ts";
import { hasLayer } from "../hybrid-pattern.ts";
import type { LoraModule } from "../keys/lora.ts";
import type { Key, TrainingConfiguration } from "../schema.ts";
import { type Check, unless } from "./check.ts";

/** Whether any layer has the projection. */
const exists: Readonly<Record<LoraModule, (c: TrainingConfiguration) => boolean>> = {
	linear_qkv: (c) => hasLayer(c.hybridLayerPattern, "attention"),
	linear_q_proj: (c) => hasLatents(c) && c.qLoraRank === null,
	linear_q_down_proj: hasQueryLatent,
	linear_q_up_proj: hasQueryLatent,
	linear_kv_down_proj: hasLatents,
	linear_kv_up_proj: hasLatents,
	linear_proj: (c) => hasLayer(c.hybridLayerPattern, "attention", "latentAttention"),
	linear_fc1: hasFeedForward,
	linear_fc2: hasFeedForward,
	in_proj: (c) => hasLayer(c.hybridLayerPattern, "mamba", "gdn"),
	out_proj: (c) => hasLayer(c.hybridLayerPattern, "mamba", "gdn"),
	"experts.linear_fc1": (c) => hasLayer(c.hybridLayerPattern, "moe"),
	"experts.linear_fc2": (c) => hasLayer(c.hybridLayerPattern, "moe"),
	"vision_model.linear_qkv": hasEncoder,
	"vision_model.linear_proj": hasEncoder,
	"vision_model.linear_fc1": hasEncoder,
	"vision_model.linear_fc2": hasEncoder,
	"vision_projection.linear_fc1": hasMlpProjector,
	"vision_projection.linear_fc2": hasMlpProjector,
};

function hasLatents({ hybridLayerPattern }: TrainingConfiguration): boolean {
	return hasLayer(hybridLayerPattern, "latentAttention");
}

function hasQueryLatent(c: TrainingConfiguration): boolean {
	return hasLatents(c) && c.qLoraRank !== null;
}

function hasMlpProjector(c: TrainingConfiguration): boolean {
	return hasEncoder(c) && c.visionProjectionType === "mlp";
}

/** The first target of a part of the model; undefined: it has none. */
const targetOf = (c: TrainingConfiguration, part: "experts" | "vision_model" | "vision_projection") =>
	c.loraRank === null ? undefined : c.loraTargetModules.find((module) => module.startsWith(`${part}.`));

/** Refuses to freeze a part whose adapters train, and to write adapters beside a part that trains whole, which no PEFT folder holds. */
function trains(key: "freeze-vit" | "freeze-projection", part: "vision_model" | "vision_projection"): Check {
	return (c) => {
		const target = targetOf(c, part);
		const frozen = key === "freeze-vit" ? c.freezeVit : c.freezeProjection;
		if (frozen && target !== undefined) {
			return { key, message: `allowed is false with the target ${target}, whose adapters train` };
		}
		return unless(
			c.savePeft === null || !hasEncoder(c) || frozen || target !== undefined,
			"save-peft",
			`it needs ${key} or targets of ${part}: a PEFT folder has adapters alone, and this part trains whole`,
		);
	};
}

function hasFeedForward({ hybridLayerPattern: pattern, moeSharedExpertIntermediateSize }: TrainingConfiguration) {
	return hasLayer(pattern, "mlp") || (hasLayer(pattern, "moe") && moeSharedExpertIntermediateSize > 0);
}

const targetsExperts = (c: TrainingConfiguration) => targetOf(c, "experts") !== undefined;

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
	(c) => {
		const lacking = c.loraTargetModules.find((module) => module.startsWith("vision_") && !exists[module](c));
		return unless(
			c.loraRank === null || lacking === undefined,
			"lora-target-modules",
			`${lacking} is of an encoder${lacking?.startsWith("vision_projection") ? " with vision-projection-type mlp" : ""}, which this model has not`,
		);
	},
	trains("freeze-vit", "vision_model"),
	trains("freeze-projection", "vision_projection"),
	(c) => {
		const target = targetOf(c, "vision_model") ?? targetOf(c, "vision_projection");
		return unless(
			target === undefined || c.loraDropout === 0,
			"lora-dropout",
			`allowed is 0 with the target ${target}: rows of pictures have no place among the tokens`,
		);
	},
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
