/** Models and elastic configurations for tests. */
import { parseHybridPattern } from "../../../src/config/hybrid-pattern.ts";
import { type Axis, type AxisName, axisNames } from "../../../src/guests/elastic/axes.ts";
import type { ElasticConfig } from "../../../src/guests/elastic/config.ts";
import type { HybridConfig } from "../../../src/models/language/config.ts";
import { smallSubject } from "../../parity/verify/subject.ts";

export interface ModelSizes {
	readonly hidden: number;
	readonly vocabulary: number;
	readonly mamba: {
		readonly heads: number;
		readonly headDim: number;
		readonly groups: number;
		readonly stateDim: number;
	};
	readonly attention: { readonly heads: number; readonly queryGroups: number; readonly headDim: number };
	readonly moe: { readonly experts: number; readonly topk: number; readonly ffn: number; readonly shared: number };
}

/** A model of those sizes whose other options are those of verify's small one. */
export function elasticModel(pattern: string, sizes: ModelSizes): HybridConfig {
	const { language } = smallSubject();
	const { hidden, vocabulary, mamba, attention, moe } = sizes;
	return {
		...language,
		pattern: parseHybridPattern(pattern),
		blocks: [...pattern].map(() => 1),
		mtp: null,
		hiddenSize: hidden,
		vocabularySize: vocabulary,
		paddedVocabularySize: vocabulary,
		tieWordEmbeddings: false,
		mamba: { ...language.mamba, ...mamba, convKernel: 4 },
		attention: { ...language.attention, ...attention },
		mlp: { ...language.mlp, activation: "squaredRelu" },
		moe: {
			...language.moe,
			experts: moe.experts,
			topk: moe.topk,
			ffnHiddenSize: moe.ffn,
			sharedExpertSize: moe.shared,
		},
	};
}

/** Soft masks over homogeneous axes of those sizes, budgets 1 and 0.5. */
export function testElastic(
	model: HybridConfig,
	sizes: Partial<Record<AxisName, readonly number[]>>,
	changes: Partial<ElasticConfig> = {},
): ElasticConfig {
	return {
		axes: axisNames.flatMap((name): Axis[] => (sizes[name] ? [{ name, sizes: sizes[name], layers: null }] : [])),
		ranking: [],
		budgets: [1, 0.5],
		budgetProbabilities: null,
		parentProbability: 0,
		budget: { type: "param", target: "active" },
		router: { width: 8, standardDeviation: 0.3, normalise: false, frozen: false, learningRateMultiplier: 1 },
		scale: null,
		temperature: { initial: 1, decay: 1 },
		hardThreshold: 1,
		softMask: true,
		lossWeight: 1,
		compat: false,
		seed: model.hiddenSize,
		...changes,
	};
}
