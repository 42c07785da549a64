/** Mamba-2 layers (docs/spec/language-model.md §2). */
import { defaulting, derived, integer, list, optional } from "../field.ts";

export const mambaKeys = {
	"mamba-num-heads": derived(
		integer(1),
		"2 × hidden-size / mamba-head-dim; without M: mamba-num-groups",
		"Heads of a Mamba-2 layer.",
	),
	"mamba-num-heads-per-layer": optional(
		list(integer(1)),
		"Heads of every M of the pattern's main part in order, where they differ; unset: mamba-num-heads each.",
	),
	"mamba-head-dim": defaulting(integer(1), 64, "Width of one Mamba-2 head."),
	"mamba-num-groups": defaulting(integer(1), 8, "Groups that share B and C; also the groups of the gated norm."),
	"mamba-state-dim": defaulting(integer(1), 128, "State dimension N."),
	"mamba-conv-kernel-dim": defaulting(integer(1), 4, "Taps of the causal convolution; a constant in Megatron."),
	"mamba-chunk-size": defaulting(integer(1), 128, "Tokens of one chunk of the scan; a constant in Megatron.", {
		model: false,
	}),
	"linear-conv-kernel-dim": defaulting(integer(1), 4, "Convolution width of Gated DeltaNet layers.", {
		noEffect: "Gated DeltaNet is not built; the Mamba convolution is mamba-conv-kernel-dim",
	}),
} as const;
