/** Length of the training, batch sizes, schedules, evaluation, exits (docs/spec/runtime.md §5, §12). */
import { choice, defaulting, derived, fraction, integer, number, off, optional, positiveNumber } from "../field.ts";

export const scheduleKeys = {
	"micro-batch-size": defaulting(integer(1), 1, "Sequences of one microbatch of a data lane."),
	"global-batch-size": derived(
		integer(1),
		"micro-batch-size × data lanes",
		"Sequences of one step; a multiple of micro-batch-size × data lanes.",
	),
	"train-iters": optional(integer(1), "Steps to train; or give train-samples or train-epochs."),
	"train-samples": optional(integer(1), "Samples to train; or give train-iters or train-epochs."),
	"train-epochs": optional(
		positiveNumber,
		"Passes over the training data, from whose length train-iters follows; may be fractional. Packed sequences and blends by weight have no length.",
	),
	"lr-decay-style": defaulting(
		choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"]),
		"linear",
		"Decay of the learning rate.",
	),
	"lr-warmup-iters": defaulting(integer(0), 0, "Steps of linear warm-up."),
	"lr-warmup-samples": defaulting(integer(0), 0, "Samples of linear warm-up."),
	"lr-warmup-fraction": optional(fraction, "Warm-up as a fraction of the decay horizon."),
	"lr-warmup-init": defaulting(number(0), 0, "Learning rate at the start of the warm-up."),
	"lr-decay-iters": optional(integer(1), "Steps until min-lr; unset: the whole training."),
	"lr-decay-samples": optional(integer(1), "Samples until min-lr; unset: the whole training."),
	"lr-wsd-decay-style": defaulting(
		choice(["exponential", "linear", "cosine", "minus_sqrt"]),
		"exponential",
		"Shape of the anneal at the end of WSD.",
	),
	"lr-wsd-decay-iters": optional(integer(1), "Steps of the anneal at the end of WSD."),
	"lr-wsd-decay-samples": optional(integer(1), "Samples of the anneal at the end of WSD."),
	"override-opt-param-scheduler": off("Keep this schedule when a checkpoint has another."),
	"use-checkpoint-opt-param-scheduler": off("Take the schedule of the checkpoint."),
	"eval-interval": defaulting(integer(1), 1000, "Steps between evaluations.", { megatron: "unset" }),
	"eval-iters": defaulting(integer(0), 0, "Microbatch rounds of one evaluation; 0: none.", { megatron: "100" }),
	"eval-global-batch-size": derived(integer(1), "global-batch-size", "Sequences of one evaluation round."),
	"eval-micro-batch-size": derived(integer(1), "micro-batch-size", "Microbatch of an evaluation."),
	"eval-captions": defaulting(
		integer(0),
		0,
		"Held-out images whose captions are decoded greedily after the training and compared; 0: none.",
	),
	"exit-interval": optional(integer(1), "Save and exit at a multiple of this many steps."),
	"exit-duration-in-mins": optional(positiveNumber, "Save and exit after this many minutes."),
	"exit-signal-handler": off("Save and exit with code 75 after the step in which SIGTERM or SIGUSR1 came."),
} as const;
