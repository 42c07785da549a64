/** RunSpecification of a training configuration. */
import { hasEncoder, plannedIterations } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ElasticConfig } from "../elastic/config.ts";
import { elasticConfig } from "../elastic/from-configuration.ts";
import { guestsOf } from "../guests/index.ts";
import type { HybridConfig } from "../models/language/config.ts";
import { hybridConfig, segmentsOfConfiguration } from "../models/language/from-configuration.ts";
import { encoderConfig } from "../models/vision/from-configuration.ts";
import type { Moments } from "../optim/adamw.ts";
import { type Dispatcher, topologyOf, visionModule, type World } from "../parallel/index.ts";
import { assemble, type Run } from "./assemble.ts";
import type { DistillationOptions } from "./distillation.ts";
import type { EvaluatedBudgets } from "./evaluate.ts";
import { gradientBuckets } from "./gradient-buckets.ts";
import type { LossMean } from "./loss-weights.ts";
import type { EncoderSpecification, RunSpecification } from "./run-specification.ts";

/** `rank`: in lines that guests print. */
export function specificationOf(c: TrainingConfiguration, rank = 0): RunSpecification {
	const language = languageConfig(c);
	const elastic = elasticOf(c);
	return {
		encoders: encodersOf(c),
		language,
		elastic: elastic && { config: elastic },
		distillation: distillationOf(c),
		segments: segmentsOfConfiguration(c),
		microbatchGroup: c.microbatchGroupSizePerVirtualPipelineStage,
		lateWeightGradients: c.delayWgradCompute,
		overlap: overlapOf(c),
		frozenLanguage: freezesLanguage(c),
		adam: { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps, moments: momentsOf(c) },
		lossMean: lossMeanOf(c),
		gradientSums: c.gradReduceInBf16 ? "bf16" : "f32",
		clipGrad: c.clipGrad,
		seed: c.seed,
		distributedOptimizer: c.useDistributedOptimizer,
		buckets: (module, replicas) => gradientBuckets(c, module, replicas),
		guests: guestsOf(c, rank),
		expertCapacity: {
			bound: c.moeExpertCapacityBound,
			mostTokens: Math.ceil((c.microBatchSize * c.seqLength) / c.llmTp),
		},
		dispatcher: dispatcherOf(c),
		logNumZeros: c.logNumZerosInGrad,
		logParametersNorm: c.logParamsNorm,
	};
}

/** Whether no weight of the language model trains; --freeze-model leaves the elastic router. */
export function freezesLanguage(c: TrainingConfiguration): boolean {
	return c.freezeLm || c.freezeModel;
}

/** The encoders of a configuration, in the order of their grids. */
export function encodersOf(c: TrainingConfiguration): EncoderSpecification[] {
	return hasEncoder(c) ? [visionOf(c)] : [];
}

/** The encoder that Megatron's flags describe. */
export function visionOf(c: TrainingConfiguration): EncoderSpecification {
	return {
		name: visionModule,
		config: encoderConfig(c),
		placeholderId: c.imageTokenId,
		frozen: { tower: c.freezeVit || c.freezeModel, projector: c.freezeProjection || c.freezeModel },
		participation: { policy: c.encoderGradParticipation },
	};
}

/**
 * The language model's configuration. With --freeze-lm the routers' expert bias stays fixed too, unlike in Megatron, which goes
 * on updating it.
 */
function languageConfig(c: TrainingConfiguration): HybridConfig {
	const config = hybridConfig(c);
	return c.freezeLm ? { ...config, moe: { ...config.moe, biasUpdateRate: 0 } } : config;
}

/** The elastic model of a configuration; null if it has none. Throws a UserError that names the wrong key. */
export function elasticOf(c: TrainingConfiguration): ElasticConfig | null {
	// Commands that do not train have no number of iterations.
	const trains = c.trainIters !== null || c.trainSamples !== null;
	return c.flextron ? elasticConfig(c, hybridConfig(c), trains ? plannedIterations(c) : 1) : null;
}

/** The distillation options of a configuration; null: the model learns from labels alone. */
export function distillationOf(c: TrainingConfiguration): DistillationOptions | null {
	if (c.exportKdTeacherLoad === null && !c.selfDistillation) return null;
	const teacher = c.selfDistillation ? "self" : "frozen";
	return { teacher, temperature: c.exportKdTemperature, alpha: c.exportKdAlpha };
}

/** --calculate-per-token-loss. */
export function lossMeanOf({ calculatePerTokenLoss }: TrainingConfiguration): LossMean {
	return calculatePerTokenLoss ? "tokens" : "microbatches";
}

function momentsOf(c: TrainingConfiguration): Moments {
	const dtypes = { fp32: "f32", bf16: "bf16" } as const;
	return { expAvg: dtypes[c.expAvgDtype], expAvgSq: dtypes[c.expAvgSqDtype] };
}

/** The budgets that evaluations run, and whether they run the model itself first. */
export function evaluatedBudgets(c: TrainingConfiguration): EvaluatedBudgets {
	const elastic = elasticOf(c);
	if (elastic === null) return { parent: true, budgets: [] };
	const values = c.isFlexEval ? c.overrideSelectedBudget!.slice(0, 1) : elastic.budgets;
	const isParent = (value: number) => elastic.budget.type === "param" && value === 1;
	return { parent: !c.isFlexEval, budgets: values.map((value) => ({ value, parent: isParent(value) })) };
}

/** Builds a configuration's run on this rank. Collective over the world. */
export async function openRun(c: TrainingConfiguration, world: World): Promise<Run> {
	return await assemble(specificationOf(c, world.rank), topologyOf(c), world);
}

/** Options of combined 1F1B (--overlap-moe-expert-parallel-comm); null: off. */
export function overlapOf(c: TrainingConfiguration): { readonly earlyRelease: boolean } | null {
	return c.overlapMoeExpertParallelComm ? { earlyRelease: c.epOverlapEarlyAttnMemoryRelease } : null;
}

/** The token dispatcher of --moe-token-dispatcher-type. */
export function dispatcherOf(c: TrainingConfiguration): Dispatcher {
	const { moeTokenDispatcherType: type } = c;
	return type === "flex" ? { ranksPerNode: c.moeHybridepRanksPerNvlinkDomain } : type;
}
