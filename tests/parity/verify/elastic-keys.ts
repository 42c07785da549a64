/** Keys of an elastic small subject. */

/** Every axis but layers, hard masks. */
export const elasticKeys = {
	flextron: true,
	"enable-router": true,
	"mamba-num-groups": 2,
	"emb-int-list": [32, 24, 16],
	"mamba-int-list": [4, 2],
	"mlp-int-list": [24, 12],
	"moe-expert-int-list": [8, 6, 4],
	"head-int-list": [4, 2],
	"budget-list": [1, 0.7],
	"router-inter-dim": 8,
	"router-std": 0.4,
	"moe-router-bias-update-rate": 0,
} as const;
