/** A language model of every layer kind, small enough for float64 references and many processes. */
export const smallModel = {
	preset: "nemotron-tiny",
	"hidden-size": 32,
	"vocab-size": 61,
	"num-attention-heads": 4,
	"num-query-groups": 2,
	"kv-channels": 8,
	"mamba-num-heads": 4,
	"mamba-head-dim": 8,
	"mamba-state-dim": 8,
	"mamba-chunk-size": 16,
	"ffn-hidden-size": 48,
	"moe-ffn-hidden-size": 24,
	"moe-shared-expert-intermediate-size": 24,
} as const;

/** The small model with sizes that the tensor-parallel ranks of the tests divide. */
export const divisibleModel = {
	...smallModel,
	"make-vocab-size-divisible-by": 4,
	"mamba-num-groups": 2,
	"seq-length": 24,
} as const;
