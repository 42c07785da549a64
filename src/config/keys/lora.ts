/** Low-rank adapters (Hu et al., LoRA); modules have the names of Megatron-Bridge. */
import { choice, defaulting, fraction, integer, list, optional, path, positiveNumber } from "../field.ts";

/** Projections that may have an adapter; linear_fc1 and linear_fc2 are those of dense layers and of shared experts. */
export const loraModules = [
	"linear_qkv",
	...(["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"] as const),
	"linear_proj",
	"linear_fc1",
	"linear_fc2",
	"in_proj",
	"out_proj",
	"experts.linear_fc1",
	"experts.linear_fc2",
] as const;

/** Projections of the vision tower and of the projector that may have an adapter. */
const visionLoraModules = [
	...(["vision_model.linear_qkv", "vision_model.linear_proj", "vision_model.linear_fc1"] as const),
	...(["vision_model.linear_fc2", "vision_projection.linear_fc1", "vision_projection.linear_fc2"] as const),
] as const;
export type VisionLoraModule = (typeof visionLoraModules)[number];
export type LoraModule = (typeof loraModules)[number] | VisionLoraModule;

export const loraKeys = {
	"lora-rank": optional(
		integer(1),
		"Rank r of low-rank adapters: the weights of the language model, and of a tower and a projector with a target, are frozen, and an adapter of each target trains; unset: no adapters.",
		{ model: "adapters" },
	),
	"lora-alpha": defaulting(positiveNumber, 32, "α: an adapter adds (α / r) B A to the weight of its projection.", {
		model: "adapters",
	}),
	"lora-dropout": defaulting(fraction, 0, "Dropout of an adapter's input."),
	"lora-target-modules": defaulting(
		list<LoraModule>(choice([...loraModules, ...visionLoraModules])),
		["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj"],
		"Projections that get an adapter, in every layer; experts.… are those of routed experts, vision_model.… of the vision tower, vision_projection.… of the projector.",
		{ model: "adapters", megatron: "linear_qkv,linear_proj,linear_fc1,linear_fc2, those of routed experts too" },
	),
	"load-peft": optional(path, "Start from the adapters of a PEFT folder; the base is that of load-hf."),
	"save-peft": optional(
		path,
		"Write the trained adapters as a PEFT folder, a new or empty one or that of the same training.",
	),
} as const;
