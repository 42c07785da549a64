/** Output while training, printed and written (docs/spec/runtime.md §6, §12.3). */
import { boolean, choice, defaulting, integer, off, optional, path, text } from "../field.ts";

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
