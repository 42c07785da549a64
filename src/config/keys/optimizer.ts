/** AdamW, precision and clipping (docs/spec/runtime.md §4, docs/spec/language-model.md §7). */
import {
	boolean,
	choice,
	defaulting,
	derived,
	fraction,
	integer,
	list,
	number,
	off,
	optional,
	positiveNumber,
} from "../field.ts";

/** The parts of the language model whose products can be in FP8. */
export const fp8Modules = ["experts", "projections"] as const;
export type Fp8Module = (typeof fp8Modules)[number];

const fp16 = "there is no fp16 training and so no loss scaling";

export const optimizerKeys = {
	optimizer: defaulting(
		choice(["adam", "muon"], ["sgd", "lion", "soap", "adaptive_muon"]),
		"adam",
		"adam: AdamW; muon: Muon for the matrices of linear layers, AdamW for the rest.",
	),
	lr: derived(
		number(0),
		"1e-4 with lora-rank, 2e-5 from load-hf or pretrained-checkpoint, else 3e-4",
		"Maximum learning rate.",
	),
	"min-lr": defaulting(number(0), 0, "Minimum learning rate."),
	"weight-decay": defaulting(number(0), 0.01, "Decoupled weight decay."),
	"start-weight-decay": optional(number(0), "Weight decay at the start of its ramp."),
	"end-weight-decay": optional(number(0), "Weight decay at the end of its ramp."),
	"weight-decay-incr-style": defaulting(
		choice(["constant", "linear", "cosine"]),
		"constant",
		"Ramp from start- to end-weight-decay over the training.",
	),
	"adam-beta1": defaulting(fraction, 0.9, "Decay of the first moment."),
	"adam-beta2": defaulting(fraction, 0.999, "Decay of the second moment."),
	"adam-eps": defaulting(positiveNumber, 1e-8, "Added to the root of the second moment."),
	"muon-momentum": defaulting(fraction, 0.9, "Decay of Muon's momentum."),
	"muon-nesterov": off("Nesterov's momentum in Muon.", { aliases: ["muon-use-nesterov"] }),
	"muon-no-split-qkv": off("Take fused query, key and value projections as one matrix in Muon, not as three."),
	"muon-scale-mode": defaulting(
		choice(["spectral", "unit_rms_norm", "shape_scaling"]),
		"spectral",
		"Factor of Muon's updates of matrices [out, in]: √max(out, in), √(out / in) or √max(1, out / in).",
	),
	"muon-extra-scale-factor": defaulting(
		positiveNumber,
		1,
		"Further factor of Muon's updates; with spectral, 0.2 makes them as large as AdamW's.",
	),
	"muon-coefficient-type": defaulting(
		choice(["simple", "quintic", "polar_express", "cans", "aol"], ["deepseekv4", "cubic5", "custom"]),
		"quintic",
		"Coefficients of the Newton-Schulz iteration.",
	),
	"muon-num-ns-steps": defaulting(integer(1), 5, "Steps of the Newton-Schulz iteration."),
	"muon-fp32-matmul-prec": defaulting(
		choice(["medium", "high"], ["low"]),
		"medium",
		"Products of the Newton-Schulz iteration; medium: in bf16 on GPUs, fp32 on processors; high: fp32.",
	),
	"muon-tp-mode": defaulting(
		choice(["duplicated"], ["blockwise", "distributed"]),
		"duplicated",
		"Matrices of tensor-parallel ranks are put together for the Newton-Schulz iteration, each on one rank.",
	),
	"muon-scalar-optimizer": defaulting(choice(["adam"], ["lion"]), "adam", "Optimizer of what Muon does not update."),
	"clip-grad": defaulting(number(0), 1, "Global gradient norm above which gradients are scaled down; 0: never."),
	bf16: off("Parameters and activations in bf16 with fp32 master weights, moments and gradients."),
	"fp8-format": optional(
		choice(["e4m3"], ["hybrid"]),
		"Forward products and input gradients of fp8-modules with operands rounded to FP8, experts' weight gradients with fp8-wgrad; masters are not.",
		{ model: false },
	),
	"fp8-recipe": optional(
		choice(["blockwise"], ["delayed", "tensorwise", "mxfp8", "custom"]),
		"Numbers that share a scaling factor; blockwise: 128 of a row, 128 × 128 of a weight.",
		{ model: false, megatron: "delayed" },
	),
	"fp8-modules": defaulting(
		list<Fp8Module>(choice(fp8Modules)),
		["experts"],
		"With fp8-format: experts, both projections of routed experts; projections, those of the language model's attention, Mamba-2, Gated DeltaNet, MLPs and shared experts. Embedding, output layer, router and encoder are not rounded.",
		{ model: false },
	),
	"fp8-wgrad": off(
		"Weight gradients of experts with operands rounded to FP8 too; experts without biases then keep their rows in FP8 alone.",
		{ megatron: "true" },
	),
	"fp8-emulate": off(
		"Round as FP8 products would on a device that has none, in bf16 or fp32, to see what it does to a model; slow.",
	),
	"grad-reduce-in-bf16": off("Round gradients to bf16 for their sums over replicas; they are added up in fp32 before."),
	"exp-avg-dtype": defaulting(
		choice(["fp32", "bf16"], ["fp16", "fp8"]),
		"fp32",
		"Type in which Adam's first moment is stored; its arithmetic is fp32.",
	),
	"exp-avg-sq-dtype": defaulting(
		choice(["fp32", "bf16"], ["fp16", "fp8"]),
		"fp32",
		"Type in which Adam's second moment is stored; its arithmetic is fp32.",
	),
	"main-grads-dtype": defaulting(
		choice(["fp32"], ["bf16"]),
		"fp32",
		"Type in which gradients are added up and given to the optimizer.",
	),
	"main-params-dtype": defaulting(choice(["fp32"], ["fp16"]), "fp32", "Type of master weights."),
	"use-precision-aware-optimizer": off("Let exp-avg-dtype and exp-avg-sq-dtype differ from fp32.", {
		noEffect: "they need no leave",
	}),
	"no-gradient-accumulation-fusion": off("Weight gradients rounded to the model's precision before they are added.", {
		noEffect: "weight gradients are always added in fp32",
	}),
	"calculate-per-token-loss": defaulting(
		boolean,
		true,
		"true: gradient of the mean over all loss tokens of the step; false: of the mean of the microbatches' means.",
		{ megatron: "false" },
	),
	"cross-entropy-loss-fusion": off("Round the gradient of the logits to bf16, as Megatron's fused loss does."),
	"z-loss-coeff": defaulting(
		number(0),
		0,
		"Coefficient of the z-loss of the vocabulary logits, which evaluations leave out.",
	),
	"check-for-nan-in-loss-and-grad": defaulting(
		boolean,
		true,
		"Stop at the first loss or gradient norm that is not finite.",
	),
	"check-for-spiky-loss": off("Stop at a loss of ten times the largest of the first hundred steps, or more."),
	"check-for-large-grads": off("Stop at a gradient norm of ten times the largest of the first hundred steps, or more."),
	"check-weight-hash-across-dp-replicas-interval": optional(
		integer(1),
		"Steps between comparisons of the parameters of data-parallel replicas, bit by bit, which name a rank with a wrong result; states that are saved or kept are compared too.",
	),
	"use-distributed-optimizer": off("Shard optimizer state over data-parallel ranks (ZeRO-1)."),
	"loss-scale": defaulting(number(1, 1), 1, "Constant loss scale.", { megatron: "unset" }),
	"initial-loss-scale": defaulting(positiveNumber, 2 ** 32, "First dynamic loss scale.", { noEffect: fp16 }),
	"loss-scale-window": defaulting(integer(1), 1000, "Steps before the dynamic loss scale grows.", { noEffect: fp16 }),
	hysteresis: defaulting(integer(1), 2, "Overflows before the dynamic loss scale shrinks.", { noEffect: fp16 }),
	"min-loss-scale": defaulting(positiveNumber, 1, "Smallest dynamic loss scale.", { noEffect: fp16 }),
} as const;

// Length of the training, batch sizes, schedules, evaluation, exits (docs/spec/runtime.md §5, §12).

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
		"Passes over the training data, from whose length train-iters follows; may be fractional. Samples that are left out are part of the length, and those that follow take their place. Packed sequences and blends by weight have no length.",
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
