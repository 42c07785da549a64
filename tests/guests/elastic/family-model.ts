/** An elastic parent over every axis, and the budgets at which routers of several seeds choose submodels of it. */
import { configurationOf } from "../../../src/config/resolve.ts";
import type { TrainingConfiguration } from "../../../src/config/schema.ts";
import { withoutImages } from "../../../src/data/microbatch.ts";
import type { ElasticConfig } from "../../../src/guests/elastic/config.ts";
import { elasticConfig } from "../../../src/guests/elastic/from-configuration.ts";
import type { HybridConfig } from "../../../src/models/language/config.ts";
import { hybridConfig } from "../../../src/models/language/from-configuration.ts";
import { smallModel } from "../../models/small.ts";

/** A small model with units of every kind to choose from. */
export const parentModel = {
	...smallModel,
	"hybrid-layer-pattern": "MEM*EM-E*",
	"mamba-num-heads": 8,
	"mamba-num-groups": 2,
	"num-attention-heads": 8,
	"num-query-groups": 2,
	"num-experts": 6,
	"moe-router-topk": 2,
	"init-method-std": 0.3,
} as const;

const parent = {
	...parentModel,
	"moe-router-bias-update-rate": 0,
	flextron: true,
	"enable-router": true,
	"emb-int-list": [32, 27, 20, 12],
	"mamba-int-list": [8, 6, 4, 2],
	"mlp-int-list": [24, 17, 8, 3],
	"moe-expert-int-list": [6, 5, 3, 2],
	"head-int-list": [8, 6, 4, 2],
	"add-skipping": true,
	"layer-ranking-list": [6, 3, 1],
	"budget-list": [1, 0.7, 0.5],
	"router-std": 1,
} as const;

/** Every layer chooses for itself. */
export const byLayer = {
	"flex-hetero-mamba": true,
	"flex-hetero-ffn": true,
	"flex-hetero-moe-expert": true,
	"flex-hetero-head": true,
} as const;

/** Keys for masks that are weighted by probabilities, and for the MoE router that these need. */
export const softMasks = {
	"soft-mask": true,
	"moe-router-score-function": "sigmoid",
	"moe-router-load-balancing-type": ["none"],
	"moe-aux-loss-coeff": [0],
} as const;

export interface Family {
	readonly c: TrainingConfiguration;
	readonly model: HybridConfig;
	readonly elastic: ElasticConfig;
}

export function familyOf(keys: Readonly<Record<string, unknown>> = byLayer): Family {
	const c = configurationOf({ ...parent, ...keys });
	const model = hybridConfig(c);
	return { c, model, elastic: elasticConfig(c, model, 10)! };
}

export const parentSeed = 5;
/** Bias of every expert: with it a masked expert's score of 0 would be above those of the others. */
export const expertBias = Float32Array.from({ length: 6 }, (_, expert) => -2 - expert / 10);
/** Trained and between trained ones. */
export const budgets = [1, 0.85, 0.7, 0.5] as const;

export const vocabulary = 61;
const tokens = 40;
export const text = withoutImages({
	ids: Int32Array.from({ length: tokens }, (_, t) => (7 * t + ((t * t) % 13)) % vocabulary),
	labels: Int32Array.from({ length: tokens }, (_, t) => (5 * t) % vocabulary),
	lossMask: new Float32Array(tokens).fill(1),
	lengths: [24, 16],
});
