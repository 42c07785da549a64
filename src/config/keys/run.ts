/** Where and how the program runs, its data, its logs, and its checkpoints. */
import { boolean, choice, defaulting, derived, integer, number, off, optional, path, paths, text } from "../field.ts";

/** Names of the presets, apart from their values so that the schema need not import them. */
export const presetNames = [
	"nemotron-tiny",
	"nemotron-vlm-tiny",
	"nemotron-20l",
	"nemotron-54l",
	"nemotron-moe-vlm-20l",
	"nemotron-moe-vlm-54l",
	"nemotron-nano-30b-a3b",
	"nemotron-nano-12b-v2",
	"nemotron-elastic-12b",
	"nemotron-elastic-30b-a3b",
	"llama-3.2-1b",
	"llama-3.1-8b",
	"llama-3.1-70b",
	"mistral-7b-v0.3",
	"qwen2.5-7b",
	"qwen3-0.6b",
	"qwen3-8b",
	"qwen3-32b",
	"qwen3-30b-a3b",
	"qwen3-235b-a22b",
	"qwen3-next-80b-a3b",
	"qwen3.5-35b-a3b",
	"gemma-3-1b",
	"gemma-3-4b",
	"gemma-3-12b",
	"gemma-3-27b",
	"gpt-oss-20b",
	"gpt-oss-120b",
	"deepseek-v3",
	"moonlight-16b-a3b",
] as const;
export type PresetName = (typeof presetNames)[number];

export const runKeys = {
	preset: optional(choice(presetNames), "A known model and recipe; files and flags override it."),
	device: defaulting(choice(["auto", "cpu", "cuda"]), "auto", "Native library: auto takes CUDA where it works."),
	threads: defaulting(integer(0, 1024), 0, "CPU threads of a rank; 0: an equal share of the host's cores."),
	"cpu-affinity": defaulting(
		choice(["auto", "none"]),
		"auto",
		"auto: each rank runs on cores of its own near its GPU, its data threads beside, where a host has four CPUs a rank or more and no batch system has bound the ranks; none: wherever the kernel puts it.",
	),
	seed: defaulting(integer(1), 1234, "Seed of initial weights, dropout and data order."),
	"data-parallel-random-init": off("Other initial weights on every data-parallel rank.", {
		noEffect: "initial weights never depend on the layout",
	}),
	"deterministic-mode": off("Bitwise equal runs on CUDA; on the CPU they always are."),
	"cuda-graph-impl": defaulting(
		choice(["none", "local"]),
		"none",
		"local: sequences of operations that repeat from step to step are launched as CUDA graphs.",
	),
	"algorithm-choice": defaulting(
		choice(["heuristic", "cached", "timed"]),
		"heuristic",
		"Algorithms of matrix products and attention on CUDA: heuristic, the first choice of cuBLASLt and cuDNN; cached, those that an earlier run timed; timed, as cached, and missing ones are timed after the last step for later runs.",
	),
	"algorithm-cache-folder": optional(path, "Parent of the folder of timed algorithms; unset: the user's cache folder."),
	"rerun-mode": defaulting(
		choice(["disabled", "validate_results", "report_stats"]),
		"disabled",
		"Megatron's rerun state machine.",
		{ megatron: "validate_results", noEffect: "there is no rerun state machine" },
	),
} as const;

export const dataKeys = {
	"dataset-provider": derived(
		choice(["mock", "text", "tokens", "indexed", "energon"]),
		"indexed when data-path is a blend or the prefix of a .bin and .idx file, or other data-path keys are given; energon when it is a folder, URL, .jsonl or .yaml file; tokens when it is a .safetensors file; text when it is plain text and the model has no encoder; mock without data-path",
		"Source of the samples.",
		{ megatron: "mock" },
	),
	"data-path": optional(
		paths,
		"A text file; a .safetensors file with a tensor named tokens; the prefix of Megatron's .bin and .idx files, or several, or weights and prefixes in turn; or Energon data: a prepared folder, .jsonl file or metadataset .yaml.",
	),
	"train-data-path": optional(paths, "Indexed data to train on, all of them; held-out data have keys of their own."),
	"valid-data-path": optional(
		paths,
		"Validation data; unset: the part of data-path that split, or valid-data-split-part, keeps back.",
	),
	"test-data-path": optional(paths, "Indexed data for the test after the training."),
	"data-args-path": optional(path, "File with the words of data-path, for long blends."),
	"per-split-data-args-path": optional(
		path,
		"JSON file with lists train, valid and test of the words of train-data-path and so on.",
	),
	split: defaulting(text, "969,30,1", "Shares of data-path for training, validation and test."),
	"full-validation": off("Evaluate on all of the indexed validation data, not on eval-iters batches of them."),
	"reset-attention-mask": off(
		"Indexed documents are sequences of their own: attention and Mamba-2 begin anew after the token that ends a document (data-end-id, or the tokenizer's).",
	),
	"reset-position-ids": off(
		"Positions begin at 0 after the end of an indexed document, as they do with reset-attention-mask; rotary embeddings see distances alone.",
	),
	"eod-mask-loss": off(
		"The label after the end of an indexed document, the first token of the next one, does not count.",
	),
	"mid-level-dataset-surplus": defaulting(
		number(0),
		0.005,
		"Share of samples that each indexed data set of a blend is built with beyond its weight.",
	),
	"data-cache-path": optional(path, "Folder of built orders.", {
		noEffect: "the order of samples is built in memory at every start",
	}),
	"num-dataset-builder-threads": defaulting(integer(1), 1, "Threads that build the order of indexed data.", {
		noEffect: "the order of samples is built in one thread",
	}),
	"no-mmap-bin-files": off("Read .bin files without mapping them into memory.", {
		noEffect: "they are always read by position",
	}),
	"no-create-attention-mask-in-dataloader": off("Do not make attention masks with the data.", {
		noEffect: "masks are never made with the data",
	}),
	"mock-dataset-size": defaulting(integer(1), 10000, "Mock samples of one rank."),
} as const;

export const loggingKeys = {
	"log-interval": defaulting(integer(1), 100, "Steps between log lines."),
	"terminal-view": defaulting(
		boolean,
		true,
		"On a terminal, draw progress, loss, speed, memory and time left in place, with short log lines above them.",
	),
	"log-json": optional(
		path,
		"Write one JSON object a step to this file, numbers at full precision. A run that goes on appends.",
	),
	"metrics-port": optional(
		integer(0, 65535),
		"Serve the run's metrics in Prometheus' text format at /metrics of this port; 0: any free one, which is printed.",
	),
	"metrics-address": defaulting(
		text,
		"127.0.0.1",
		"Address that metrics-port is opened on, of the host whose rank prints the log; 0.0.0.0: all of its addresses.",
	),
	"log-throughput": off("Add TFLOP/s per device to the log line."),
	"log-num-zeros-in-grad": off("Add the number of zero gradients to the log line."),
	"log-params-norm": off("Add the norm of all parameters to the log line."),
	"tensorboard-dir": optional(path, "Folder of TensorBoard events."),
	"tensorboard-log-interval": defaulting(
		integer(1),
		1,
		"Steps between points of TensorBoard, MLflow and Weights & Biases.",
	),
	"log-timers-to-tensorboard": off("Iteration time and timers to TensorBoard, MLflow and Weights & Biases."),
	"mlflow-dir": optional(path, "Root of an MLflow file store (mlruns) that the run is written into."),
	"mlflow-experiment": defaulting(text, "Default", "MLflow experiment of the run."),
	"mlflow-run-name": optional(text, "Name of the run in MLflow; unset: the name of the folder of save."),
	"wandb-save-dir": optional(
		path,
		"Folder of offline runs of Weights & Biases, for `wandb sync`; unset: wandb in the folder of save.",
		{ aliases: ["wandb-dir"] },
	),
	"wandb-project": optional(text, "Project of the run in Weights & Biases; it alone switches the offline run on."),
	"wandb-exp-name": optional(text, "Name of the run in Weights & Biases."),
	"wandb-entity": optional(text, "User or team of the run in Weights & Biases."),
	"flight-recorder-dir": optional(
		path,
		"Folder of the ranks' recordings of their latest calls, from which `mimo diagnose` explains why a run ended.",
	),
	"profile-step-start": optional(integer(1), "First step to trace."),
	"profile-step-end": optional(integer(1), "Last step to trace; unset: the first one alone."),
	"profile-file": defaulting(path, "trace.json", "Trace of all ranks for Chrome's and Perfetto's viewers."),
	"slow-rank-steps": optional(
		integer(1),
		"Steps in a row after which a rank that works longer than those with the same work is named; unset: none is.",
	),
	"timing-log-level": defaulting(
		integer(0, 2),
		0,
		"Timers shown with every log line: 0 none, 1 those of a step, 2 those of microbatches too.",
	),
	"timing-log-option": defaulting(choice(["minmax", "max", "all"]), "minmax", "How timers of ranks are shown."),
	"no-barrier-with-level-1-timing": off("Timers of level 1 without a barrier.", {
		noEffect: "timers never add a barrier",
	}),
} as const;

/** Saving and loading (docs/spec/runtime.md §10). */
export const checkpointKeys = {
	save: optional(
		path,
		"Folder, or s3://BUCKET/PREFIX, that checkpoints are written to: of the last step, and every save-interval.",
	),
	"save-interval": optional(integer(1), "Steps between checkpoints."),
	"save-retain-interval": optional(
		integer(1),
		"Keep only checkpoints at multiples of this many steps, and the newest.",
	),
	keep: optional(integer(1), "Keep this many of the newest checkpoints, and those of save-retain-interval."),
	"save-retry": off("Go on training when a checkpoint cannot be written, and try again at the next one."),
	"save-over": off("Replace and delete checkpoints in save that this run neither goes on from nor has written."),
	load: optional(
		path,
		"Folder, s3://BUCKET/PREFIX or https://HOST/PATH to resume from; an absent one means a fresh start.",
	),
	"staging-dir": optional(
		path,
		"Folder on a disk of each host for copies of checkpoints in object stores; unset: the user's cache folder.",
	),
	"allow-fallback": off("Take the newest good checkpoint when the newest one is damaged."),
	"ckpt-step": optional(integer(0), "Step to load instead of the newest."),
	"pretrained-checkpoint": optional(path, "Weights to start from when load has no checkpoint.", {
		aliases: ["load-nemotron-checkpoint"],
	}),
	finetune: off("Load weights only and start at step 0."),
	"exit-on-missing-checkpoint": off("Fail when load has no checkpoint."),
	"no-save-optim": off("Save neither optimizer nor scheduler."),
	"no-load-optim": off("Load neither optimizer nor scheduler."),
	"no-load-scheduler": off("Load the optimizer without its schedule, which begins anew."),
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
		"Treatment of keys that do not match.",
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
		"Start from a Hugging Face folder: NemotronH, Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next, Qwen3.5 text or gpt-oss, or a vision-language model of one of these and RADIO. Its config.json gives the model's keys.",
	),
	"load-vision": optional(
		path,
		"Start the encoder from the tower of a Hugging Face folder, whose config.json gives its keys, or of Megatron's torch_dist checkpoint, of an encoder alone or of a model with one.",
		{ aliases: ["load-vision-from"] },
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
