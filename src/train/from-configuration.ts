/** RunSpecification of a training configuration. */
import { hasEncoder } from "../config/derive.ts";
import { modulesOf } from "../config/modules.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import { guestsOf } from "../guests/index.ts";
import type { HybridConfig } from "../models/language/config.ts";
import { hybridConfig, segmentsOfConfiguration } from "../models/language/from-configuration.ts";
import type { EncoderConfig } from "../models/vision/encoder.ts";
import { encoderConfig } from "../models/vision/from-configuration.ts";
import { visionEncoder } from "../models/vit/tower.ts";
import type { Moments } from "../optim/adamw.ts";
import {
	type BucketSize,
	type Dispatcher,
	type DispatcherChoice,
	languageModule,
	topologyOf,
	type World,
} from "../parallel/index.ts";
import { assemble, type Run } from "./assemble.ts";
import { partsOf } from "./encoder-kinds.ts";
import type { LossMean } from "./loss-weights.ts";
import type { EncoderSpecification, RunSpecification } from "./run-specification.ts";

/** `rank`: in lines that guests print. */
export function specificationOf(c: TrainingConfiguration, rank = 0): RunSpecification {
	return {
		encoders: encodersOf(c),
		language: languageConfig(c),
		segments: segmentsOfConfiguration(c),
		microbatchGroup: c.microbatchGroupSizePerVirtualPipelineStage,
		lateWeightGradients: c.delayWgradCompute,
		overlap: overlapOf(c),
		frozenLanguage: freezesLanguage(c),
		adam: { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps, moments: momentsOf(c) },
		muon: muonOf(c),
		lossMean: lossMeanOf(c),
		gradientSums: c.gradReduceInBf16 ? "bf16" : "f32",
		clipGrad: c.clipGrad,
		seed: c.seed,
		distributedOptimizer: c.useDistributedOptimizer,
		buckets: (module, replicas) => gradientBuckets(c, module, replicas),
		guests: guestsOf(c, rank),
		expertCapacity: {
			bound: c.moeExpertCapacityBound,
			mostTokens: Math.ceil((c.microBatchSize * c.seqLength) / (c.llmTp * c.llmCp)),
		},
		dispatcher: dispatcherOf(c),
		logNumZeros: c.logNumZerosInGrad,
		logParametersNorm: c.logParamsNorm,
	};
}

/** Whether no weight of the language model trains; --freeze-model leaves what guests train. */
export function freezesLanguage(c: TrainingConfiguration): boolean {
	return c.freezeLm || c.freezeModel;
}

/** The encoders of a configuration, in the order of their grids. */
export function encodersOf(c: TrainingConfiguration): EncoderSpecification[] {
	return [...(hasEncoder(c) ? [visionOf(c, encoderConfig(c))] : []), ...moreEncoders(c)];
}

/** The encoders that `modules` names. */
export function moreEncoders(c: TrainingConfiguration): EncoderSpecification[] {
	return modulesOf(c).map((module) => ({
		parts: partsOf(module, c),
		placeholderId: module.placeholderTokenId,
		frozen: {
			tower: c.freezeModel || module.freeze?.includes("tower") === true,
			projector: c.freezeModel || module.freeze?.includes("projector") === true,
		},
		learningRateMultiplier: module.lrMult,
	}));
}

/** The encoder that Megatron's flags describe. */
export function visionOf(c: TrainingConfiguration, config: EncoderConfig): EncoderSpecification {
	return {
		parts: visionEncoder(config),
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

/** --calculate-per-token-loss. */
export function lossMeanOf({ calculatePerTokenLoss }: TrainingConfiguration): LossMean {
	return calculatePerTokenLoss ? "tokens" : "microbatches";
}

function momentsOf(c: TrainingConfiguration): Moments {
	const dtypes = { fp32: "f32", bf16: "bf16" } as const;
	return { expAvg: dtypes[c.expAvgDtype], expAvgSq: dtypes[c.expAvgSqDtype] };
}

/** Options of --optimizer muon; null: the optimizer is another. */
export function muonOf(c: TrainingConfiguration): NonNullable<RunSpecification["muon"]> | null {
	if (c.optimizer !== "muon") return null;
	return {
		momentum: c.muonMomentum,
		nesterov: c.muonNesterov,
		splits: !c.muonNoSplitQkv,
		coefficients: c.muonCoefficientType,
		steps: c.muonNumNsSteps,
		scale: c.muonScaleMode,
		extraScale: c.muonExtraScaleFactor,
		precision: c.muonFp32MatmulPrec,
	};
}

/** Builds a configuration's run on this rank. Collective over the world. */
export async function openRun(c: TrainingConfiguration, world: World): Promise<Run> {
	return await assemble(specificationOf(c, world.rank), topologyOf(c), world);
}

/** Options of combined 1F1B (--overlap-moe-expert-parallel-comm); null: off. */
export function overlapOf(c: TrainingConfiguration): { readonly earlyRelease: boolean } | null {
	return c.overlapMoeExpertParallelComm ? { earlyRelease: c.epOverlapEarlyAttnMemoryRelease } : null;
}

/** What --moe-token-dispatcher-type auto chooses by. */
function dispatcherChoiceOf(c: TrainingConfiguration): DispatcherChoice {
	const bounded = c.moeExpertCapacityBound !== null;
	return { topk: c.moeRouterTopk, ranksPerNode: c.moeHybridepRanksPerNvlinkDomain, bounded };
}

/** The token dispatcher of --moe-token-dispatcher-type. */
export function dispatcherOf(c: TrainingConfiguration): Dispatcher | DispatcherChoice {
	const { moeTokenDispatcherType: type } = c;
	if (type === "auto") return dispatcherChoiceOf(c);
	return type === "flex" ? { ranksPerNode: c.moeHybridepRanksPerNvlinkDomain } : type;
}

// Gradient bucketing by the configuration: bucket sizes, and whether reductions overlap with backward (docs/spec/runtime.md
// §3.6).

/** Megatron's default bucket size in elements, for `replicas` data-parallel ranks. */
function usualElements(replicas: number): number {
	return Math.max(40e6, 1e6 * replicas);
}

/** Buckets of a module whose reductions overlap with backward; null: gradients are reduced after backward, in one piece. */
function gradientBuckets(
	c: Pick<TrainingConfiguration, "ddpBucketSize" | "ddpNumBuckets" | "encoderDdpOverlap" | "overlapGradReduce">,
	module: string,
	replicas: number,
): BucketSize | null {
	if (!c.overlapGradReduce || (module !== languageModule && !c.encoderDdpOverlap)) return null;
	if (c.ddpNumBuckets !== null) return { count: c.ddpNumBuckets };
	return { elements: c.ddpBucketSize ?? usualElements(replicas) };
}
