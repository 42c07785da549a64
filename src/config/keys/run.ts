/** Where and how the program runs. */
import { choice, defaulting, integer, off, optional, path } from "../field.ts";
import { presetNames } from "../preset-names.ts";

export const runKeys = {
	preset: optional(choice(presetNames), "A known model and recipe; files and flags override it."),
	device: defaulting(choice(["auto", "cpu", "cuda"]), "auto", "Native library: auto takes CUDA where it works."),
	threads: defaulting(integer(0, 1024), 0, "CPU threads of a rank; 0: an equal share of the host's cores."),
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
