/** Megatron's arguments of a model give the model back, whatever of it differs from Megatron's defaults. */
import { expect, test } from "bun:test";
import { argumentsOf, configurationFromArguments } from "../../../src/checkpoint/torch-dist/arguments.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { modelDifferences } from "../../../src/config/same-model.ts";

const unusual = {
	"hybrid-layer-pattern": "M*E-/*E",
	"hidden-size": 48,
	"ffn-hidden-size": 40,
	"num-attention-heads": 6,
	"num-query-groups": 2,
	"kv-channels": 10,
	"mamba-num-heads": 6,
	"mamba-head-dim": 5,
	"mamba-num-groups": 3,
	"mamba-state-dim": 7,
	"mamba-conv-kernel-dim": 3,
	"position-embedding-type": "rope",
	"rotary-base": 500,
	"rotary-percent": 0.4,
	"quick-geglu": true,
	"activation-func-clamp-value": 7,
	"glu-linear-offset": -0.5,
	"add-bias-linear": true,
	"norm-epsilon": 1e-6,
	"apply-layernorm-1p": true,
	"post-layernorm": true,
	"softmax-scale": 0.2,
	"embedding-multiplier": 6,
	"embedding-padding-idx": 3,
	"init-method-std": 0.1,
	"hidden-dropout": 0.1,
	"attention-dropout": 0.2,
	"num-experts": 12,
	"num-experts-per-layer": [24],
	"moe-router-topk": 4,
	"moe-ffn-hidden-size": 24,
	"moe-latent-size": 20,
	"moe-router-score-function": "softmax",
	"moe-router-pre-softmax": true,
	"moe-router-topk-scaling-factor": 2.5,
	"moe-router-num-groups": 4,
	"moe-router-group-topk": 2,
	"mtp-loss-scaling-factor": 0.3,
	"mtp-use-repeated-layer": true,
	"vocab-size": 61,
	"seq-length": 32,
	"train-iters": 1,
	lr: 0.01,
	"global-batch-size": 1,
	"micro-batch-size": 1,
};

test("every property of a model comes back from its arguments", () => {
	const c = configurationOf({ ...unusual, "moe-shared-expert-intermediate-size": 0 });
	const back = configurationFromArguments(argumentsOf(c, 128))!;
	const own = Object.fromEntries(Object.keys(back).map((key) => [key, c[key as keyof typeof c]]));
	// A constant that changes no value.
	expect({ ...back, mambaChunkSize: c.mambaChunkSize }).toEqual(own as never);
});

test("Sinkhorn's routing comes back, and losses that leave the model what it is do not", () => {
	const told = (type: string) => {
		const c = configurationOf({
			preset: "nemotron-tiny",
			"moe-router-score-function": "softmax",
			...bias,
			[key]: [type],
		});
		return configurationFromArguments(argumentsOf(c, 256))!.moeRouterLoadBalancingType;
	};
	const key = "moe-router-load-balancing-type";
	const bias = {
		"moe-router-enable-expert-bias": false,
		"moe-aux-loss-coeff": [0],
		"moe-router-topk-scaling-factor": 1,
	};
	expect(told("sinkhorn")).toEqual(["sinkhorn"]);
	expect(told("aux_loss")).toBeUndefined();
});

test("LayerNorm and learned positions come back too", () => {
	const gpt = {
		normalization: "LayerNorm",
		"apply-layernorm-1p": false,
		"position-embedding-type": "learned_absolute",
	};
	const c = configurationOf({ ...unusual, ...gpt, "hybrid-layer-pattern": "M*E-", "max-position-embeddings": 40 });
	const { normalization, positionEmbeddingType, maxPositionEmbeddings } = configurationFromArguments(
		argumentsOf(c, 128),
	)!;
	expect({ normalization, positionEmbeddingType, maxPositionEmbeddings }).toEqual({
		...{ normalization: "LayerNorm", positionEmbeddingType: "learned_absolute" },
		maxPositionEmbeddings: 40,
	});
});

test.each([[[2]], [[1, 0, 0, 0]], [null]])("windows of layers %j come back too", (skip) => {
	const windows = { "window-size": [19, 0], "window-attn-skip-freq": skip };
	const c = configurationOf({ preset: "nemotron-tiny", "hybrid-layer-pattern": "*-*-", ...windows });
	expect(configurationFromArguments(argumentsOf(c, 128))).toMatchObject({
		...{ windowSize: [19, 0], windowAttnSkipFreq: skip },
	});
});

test.each([
	{ "position-embedding-type": "yarn", "rotary-scaling-factor": 32, "yarn-correction-range-round-to-int": false },
	{ "position-embedding-type": "yarn", "yarn-beta-fast": 16, "mscale-all-dim": 0.5, "yarn-attention-factor": 0.9 },
	{ "position-embedding-type": "rope", "rotary-seq-len-interpolation-factor": 8 },
	{ "softmax-type": "learnable" },
])("%j comes back", (positions) => {
	const c = configurationOf({ preset: "nemotron-tiny", ...positions });
	const back = configurationFromArguments(argumentsOf(c, 128))!;
	expect(modelDifferences({ ...back }, { ...c })).toEqual([]);
	expect(back.positionEmbeddingType).toBe(c.positionEmbeddingType);
});

test("a model as Megatron's own has no argument that Megatron lacks", () => {
	const c = configurationOf({ ...unusual, "mamba-conv-kernel-dim": 4, "num-experts-per-layer": null });
	expect(Object.keys(argumentsOf(c, 128)).filter((name) => /conv|per_layer/.test(name))).toEqual([]);
});

test.each([true, false])("a gate of the shared expert (%p) comes back", (gated) => {
	const c = configurationOf({ preset: "nemotron-tiny", "moe-shared-expert-gate": gated });
	expect(configurationFromArguments(argumentsOf(c, 128))!.moeSharedExpertGate).toBe(gated);
});
