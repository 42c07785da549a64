/** Mamba-2 layers (docs/spec/language-model.md §2) and Gated DeltaNet (docs/spec/families.md §2.5). */
import { defaulting, derived, integer, list, optional } from "../field.ts";

export const mambaKeys = {
	"mamba-num-heads": derived(
		integer(1),
		"2 × hidden-size / mamba-head-dim; without M: mamba-num-groups",
		"Heads of a Mamba-2 layer.",
		{ place: "mamba.heads" },
	),
	"mamba-num-heads-per-layer": optional(
		list(integer(1)),
		"Heads of every M of the pattern's main part in order, where they differ; unset: mamba-num-heads each.",
	),
	"mamba-head-dim": defaulting(integer(1), 64, "Width of one Mamba-2 head.", { place: "mamba.headDim" }),
	"mamba-num-groups": defaulting(integer(1), 8, "Groups that share B and C; also the groups of the gated norm.", {
		place: "mamba.groups",
	}),
	"mamba-state-dim": defaulting(integer(1), 128, "State dimension N.", { place: "mamba.stateDim" }),
	"mamba-conv-kernel-dim": defaulting(integer(1), 4, "Taps of the causal convolution; a constant in Megatron.", {
		place: "mamba.convKernel",
	}),
	"mamba-chunk-size": defaulting(integer(1), 128, "Tokens of one chunk of the scan; a constant in Megatron.", {
		told: true,
		place: "mamba.chunkSize",
		model: false,
	}),
} as const;

/** Defaults are Megatron's. */
export const linearAttentionKeys = {
	"linear-num-key-heads": defaulting(integer(1), 16, "Query and key heads of a Gated DeltaNet layer.", {
		place: "linearAttention.keyHeads",
	}),
	"linear-num-value-heads": defaulting(
		integer(1),
		32,
		"Value heads of a Gated DeltaNet layer, a multiple of linear-num-key-heads.",
		{ place: "linearAttention.valueHeads" },
	),
	"linear-key-head-dim": defaulting(integer(1), 128, "Width of its query and key heads.", {
		place: "linearAttention.keyDim",
	}),
	"linear-value-head-dim": defaulting(integer(1), 128, "Width of its value heads.", {
		place: "linearAttention.valueDim",
	}),
	"linear-conv-kernel-dim": defaulting(integer(1), 4, "Taps of its causal convolution.", {
		place: "linearAttention.convKernel",
	}),
} as const;
