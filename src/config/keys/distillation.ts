/** Distillation from a teacher's logits (docs/spec/elastic.md §11). */
import { defaulting, number, off, optional, path, positiveNumber } from "../field.ts";

export const distillationKeys = {
	"export-kd-teacher-load": optional(
		path,
		"Checkpoint of the teacher, of any format and with the student's tokens: training draws the student's distribution to the teacher's.",
	),
	"export-kd-teacher-model-config": optional(
		path,
		"The teacher's keys, where its checkpoint does not say them: a YAML file or a Hugging Face folder. Unset: model_config.yaml in the checkpoint's folder, if there is one.",
		{ aliases: ["teacher-model-config"] },
	),
	"export-kd-cfg": optional(
		path,
		"YAML file of Model Optimizer's settings: temperature, weights of the losses, and pairs of layers whose hidden states are compared too.",
	),
	"self-distillation": off(
		"With flextron: every budget but the parent's own learns from the parent's weights of the same step, the parent from labels.",
	),
	"export-kd-temperature": defaulting(positiveNumber, 1, "Divisor of the logits of both models."),
	"export-kd-alpha": defaulting(
		number(0, 1),
		1,
		"Weight of the divergence from the teacher; the language model's loss has the rest.",
	),
} as const;
