/** Saving and loading (docs/spec/runtime.md §10). */
import { choice, defaulting, integer, off, optional, path } from "../field.ts";

export const checkpointKeys = {
	save: optional(path, "Folder that checkpoints are written to: of the last step, and every save-interval."),
	"save-interval": optional(integer(1), "Steps between checkpoints."),
	"save-retain-interval": optional(
		integer(1),
		"Keep only checkpoints at multiples of this many steps, and the newest.",
	),
	keep: optional(integer(1), "Keep this many of the newest checkpoints, and those of save-retain-interval."),
	"save-retry": off("Go on training when a checkpoint cannot be written, and try again at the next one."),
	"save-over": off("Replace and delete checkpoints in save that this run neither goes on from nor has written."),
	load: optional(path, "Folder to resume from; an absent one means a fresh start."),
	"allow-fallback": off("Take the newest good checkpoint when the newest one is damaged."),
	"ckpt-step": optional(integer(0), "Step to load instead of the newest."),
	"pretrained-checkpoint": optional(path, "Weights to start from when load has no checkpoint."),
	finetune: off("Load weights only and start at step 0."),
	"exit-on-missing-checkpoint": off("Fail when load has no checkpoint."),
	"no-save-optim": off("Save neither optimizer nor scheduler."),
	"no-load-optim": off("Load neither optimizer nor scheduler."),
	"no-save-rng": off("Do not save generator states."),
	"no-load-rng": off("Do not load generator states."),
	"load-main-params-from-ckpt": off("Take fp32 master weights from the checkpoint's weights.", {
		noEffect: "weights that are loaded without the optimizer always become its fp32 masters",
	}),
	"override-ckpt-iteration": optional(integer(0), "Continue as if the checkpoint were of this step."),
	"dist-ckpt-strictness": defaulting(
		choice([
			"assume_ok_unexpected",
			"log_unexpected",
			"log_all",
			"raise_unexpected",
			"raise_all",
			"return_unexpected",
			"return_all",
			"ignore_all",
		]),
		"assume_ok_unexpected",
		"What happens to keys that do not match.",
		{ noEffect: "missing and unexpected keys are always errors" },
	),
	"dist-ckpt-optim-fully-reshardable": off("Save optimizer state by parameter, for any layout.", {
		noEffect: "optimizer state is always saved by parameter",
	}),
	"no-ckpt-fully-parallel-save": off("Let the first rank of each replica set write alone.", {
		noEffect: "every rank always writes its share",
	}),
	"async-save": off("Write checkpoints while training goes on."),
	"load-hf": optional(
		path,
		"Start from a Hugging Face folder: NemotronH, Llama, Qwen2, Qwen3 or Qwen3-MoE, or a vision-language model of one of these and RADIO. Its config.json gives the model's keys.",
	),
	"load-vision": optional(
		path,
		"Start the encoder from the RADIO tower of a Hugging Face folder, whose config.json gives its keys.",
	),
	"load-projector": optional(
		path,
		"Start the projector from a .safetensors file or a Hugging Face folder that has one; unset: a new one.",
	),
	"save-hf": optional(
		path,
		"Write the trained model as a Hugging Face folder, a new or empty one or that of the same training.",
	),
} as const;
