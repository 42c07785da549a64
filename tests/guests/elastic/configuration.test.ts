/** Keys of elastic models: their defaults, and the elastic model that they describe (docs/spec/elastic.md §2). */
import { describe, expect, test } from "bun:test";
import { configurationOf } from "../../../src/config/resolve.ts";
import { parentSizes } from "../../../src/guests/elastic/counts.ts";
import { memoryOf, memoryProfiles } from "../../../src/guests/elastic/memory.ts";
import { familyOf } from "./family-model.ts";

/** The family's parent with only these lists. */
const bare = (keys: Readonly<Record<string, unknown>>) =>
	familyOf({
		...Object.fromEntries(["emb", "mamba", "mlp", "moe-expert", "head"].map((axis) => [`${axis}-int-list`, null])),
		...{ "add-skipping": false, "layer-ranking-list": null, "budget-list": [1] },
		...keys,
	}).elastic;
const sizesOf = (keys: Readonly<Record<string, unknown>>) =>
	Object.fromEntries(bare(keys).axes.map(({ name, sizes }) => [name, sizes]));

test("defaults are Megatron's", () => {
	const c = configurationOf({ preset: "nemotron-tiny" });
	expect({
		...{ flextron: c.flextron, enableRouter: c.enableRouter, softMask: c.softMask, addSkipping: c.addSkipping },
		...{
			ranking: c.layerRankingList,
			lists: [c.embPerList, c.embIntList, c.mlpPerList, c.mambaIntList, c.moeExpertPerList],
		},
		...{ hetero: [c.flexHeteroFfn, c.flexHeteroMamba, c.flexHeteroMoeExpert] },
		...{ budgets: c.budgetList, probs: c.budgetProbs, parent: c.originalModelSampleProb, type: c.budgetType },
		...{ target: c.paramBudgetTarget, profile: c.memoryProfile, path: c.memoryProfilePath },
		...{ bytes: [c.bpeParams, c.bpeKvCache, c.bpeSsmCache, c.bpeMaxBuffer] },
		...{ use: [c.prefillChunkSize, c.memInferSeqLen, c.memBatchSize] },
		...{ router: [c.routerInterDim, c.routerStd, c.normalizeRouterLogits, c.routerGbs, c.routerBeta] },
		...{ scale: [c.linearScalerStart, c.linearScalerEnd], tau: [c.tauInit, c.tauDecay], hard: c.hardSampleTh },
		...{ alpha: c.lossAlpha, rate: c.lrMultRouter, frozen: [c.freezeRouter, c.freezeModel] },
		...{ evaluation: [c.isFlexEval, c.overrideSelectedBudget] },
	}).toEqual({
		...{ flextron: false, enableRouter: false, softMask: false, addSkipping: false },
		...{ ranking: null, lists: [null, null, null, null, null] },
		...{ hetero: [false, false, false] },
		...{ budgets: [1], probs: null, parent: 0.33, type: "param" },
		...{ target: null, profile: "bf16", path: null },
		...{ bytes: [null, null, null, null] },
		...{ use: [16384, 131072, 1] },
		...{ router: [128, 0.1, false, 32, 1] },
		...{ scale: [1, 10], tau: [1, 0.9999], hard: 0.996 },
		...{ alpha: 1, rate: 1, frozen: [false, false] },
		...{ evaluation: [false, null] },
	});
});

test("every key reaches the elastic model", () => {
	const keys = {
		"budget-list": [0.9, 0.6],
		"budget-probs": [3, 1],
		"original-model-sample-prob": 0.1,
		"param-budget-target": "total",
		"router-inter-dim": 16,
		"router-std": 0.5,
		"normalize-router-logits": true,
		"linear-scaler-start": 2,
		"linear-scaler-end": 7,
		"tau-init": 0.5,
		"tau-decay": 0.99,
		"hard-sample-th": 0.3,
		"soft-mask": true,
		...{ "moe-router-load-balancing-type": ["none"], "moe-aux-loss-coeff": [0] },
		"loss-alpha": 4,
		"lr-mult-router": 5,
		"freeze-router": true,
		"flextron-compat": true,
		seed: 99,
	};
	const { axes: _, ranking: __, ...rest } = familyOf({ ...keys, "emb-int-list": [32, 16] }).elastic;
	expect(rest).toEqual({
		budgets: [0.9, 0.6],
		budgetProbabilities: [3, 1],
		parentProbability: 0.1,
		budget: { type: "param", target: "total" },
		router: { width: 16, standardDeviation: 0.5, normalise: true, frozen: true, learningRateMultiplier: 5 },
		scale: { start: 2, end: 7, iterations: 10 },
		temperature: { initial: 0.5, decay: 0.99 },
		hardThreshold: 0.3,
		softMask: true,
		lossWeight: 4,
		compat: true,
		seed: 99,
	});
	const profile = { ...memoryProfiles.fp8_kv, ssmCache: 3, target: "total" as const };
	const use = { profile, batchSize: 2, sequenceLength: 64, prefillChunk: 32 };
	const { model } = familyOf();
	const memory = bare({
		...{ "budget-type": "mem", "budget-list": [memoryOf(model, parentSizes(model), use).value] },
		...{ "memory-profile": "fp8_kv", "bpe-ssm-cache": 3, "param-budget-target": "total" },
		...{ "mem-batch-size": 2, "mem-infer-seq-len": 64, "prefill-chunk-size": 32 },
	});
	expect(memory.budget).toEqual({ type: "mem", use });
});

describe("lists of sizes", () => {
	const parent = { mlp: [24], mamba: [8], moe_expert: [6], emb: [32] };

	test("every axis takes shares of its own size, the experts' width that of experts", () => {
		expect(sizesOf({})).toEqual(parent);
		expect(sizesOf({ "emb-per-list": [1, 0.6] })).toEqual({ ...parent, emb: [32, 19] });
		expect(sizesOf({ "mamba-per-list": [1, 0.5] })).toEqual({ ...parent, mamba: [8, 4] });
		expect(sizesOf({ "mlp-per-list": [1, 0.5], "ffn-hidden-size": 48 })).toEqual({ ...parent, mlp: [24, 12] });
		expect(sizesOf({ "moe-expert-per-list": [1, 0.5] })).toEqual({ ...parent, moe_expert: [6, 3] });
		expect(sizesOf({ "head-per-list": [1, 0.25] })).toEqual({ ...parent, head: [8, 2] });
	});

	test("sizes are kept as they are", () => {
		expect(sizesOf({ "emb-int-list": [32, 27, 5] })).toEqual({ ...parent, emb: [32, 27, 5] });
	});
});

test.each([
	[
		[0.4, 0.7, 1],
		[1, 2, 3],
		[1, 0.7, 0.4],
		[3, 2, 1],
	],
	[
		[0.7, 1, 0.4],
		[1, 2, 3],
		[1, 0.7, 0.4],
		[2, 1, 3],
	],
	[
		[1, 0.7, 0.4],
		[3, 2, 1],
		[1, 0.7, 0.4],
		[3, 2, 1],
	],
	[[0.4, 1], null, [1, 0.4], null],
	[[0.5], [1], [0.5], [1]],
] as const)("budgets %j with probabilities %j are sorted together", (budgets, probabilities, sorted, paired) => {
	const { elastic } = familyOf({ "budget-list": [...budgets], "budget-probs": probabilities && [...probabilities] });
	expect([elastic.budgets, elastic.budgetProbabilities]).toEqual([[...sorted], paired && [...paired]]);
});
