/** Mamba-2 layers (docs/spec/language-model.md §2) and Gated DeltaNet (docs/spec/families.md §2.5). */
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
} as const;

/** Megatron's defaults. */
export const linearAttentionDefaults = {
	...{ convKernelDim: 4, keyHeadDim: 128, valueHeadDim: 128, numKeyHeads: 16, numValueHeads: 32 },
} as const;

export const linearAttentionKeys = {
	"linear-num-key-heads": defaulting(
		integer(1),
		linearAttentionDefaults.numKeyHeads,
		"Query and key heads of a Gated DeltaNet layer.",
	),
	"linear-num-value-heads": defaulting(
		integer(1),
		linearAttentionDefaults.numValueHeads,
		"Value heads of a Gated DeltaNet layer, a multiple of linear-num-key-heads.",
	),
	"linear-key-head-dim": defaulting(
		integer(1),
		linearAttentionDefaults.keyHeadDim,
		"Width of its query and key heads.",
	),
	"linear-value-head-dim": defaulting(integer(1), linearAttentionDefaults.valueHeadDim, "Width of its value heads."),
	"linear-conv-kernel-dim": defaulting(
		integer(1),
		linearAttentionDefaults.convKernelDim,
		"Taps of its causal convolution.",
	),
} as const;
