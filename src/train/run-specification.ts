/** Modules and options of a run, as assemble() takes them. */
import type { Guest } from "../guests/guest.ts";
import type { HybridConfig } from "../models/language/config.ts";
import type { PipelineSegment } from "../models/language/pipeline-segments.ts";
import type { MatrixOptions } from "../models/parameter-spec.ts";
import type { EncoderParts } from "../models/vision/encoder.ts";
import type { MuonOptions } from "../optim/muon.ts";
import type { OptimizerOptions } from "../optim/optimizer.ts";
import type { BucketSize, Dispatcher, DispatcherChoice, ExpertCapacity } from "../parallel/index.ts";
import type { FloatDtype } from "../tensor/index.ts";
import type { LossMean } from "./loss-weights.ts";
import type { Participation } from "./participation.ts";

/** An encoder of a run, and the options of its training. */
export interface EncoderSpecification {
	readonly parts: EncoderParts;
	/** Id of the token that its rows replace. */
	readonly placeholderId: number;
	readonly frozen: { readonly tower: boolean; readonly projector: boolean };
	/** Factor of its learning rate; default 1. */
	readonly learningRateMultiplier?: number;
	/** Default: the exact gradient. */
	readonly participation?: Pick<Participation, "policy">;
}

/** The modules of a run and the options of its training. */
export interface RunSpecification {
	/** In the order of the topology's; empty: the language model alone. */
	readonly encoders: readonly EncoderSpecification[];
	readonly language: HybridConfig;
	/** Pipeline segments in the order of layers, one for each model chunk; a multiple of the stages. Default: one with all layers. */
	readonly segments?: readonly PipelineSegment[];
	/** Microbatch group size of interleaved 1F1B; default: the number of stages. */
	readonly microbatchGroup?: number | null;
	readonly frozenLanguage: boolean;
	readonly adam: OptimizerOptions;
	/** Of the matrices of linear layers; null, and by default: AdamW updates them too. */
	readonly muon?: (MuonOptions & MatrixOptions) | null;
	/** The loss is a mean over all tokens, or over microbatches (--calculate-per-token-loss); default: tokens. */
	readonly lossMean?: LossMean;
	readonly clipGrad: number;
	readonly seed: number;
	/** Puts weight gradients of the language model off (--delay-wgrad-compute); default: off. */
	readonly lateWeightGradients?: boolean;
	/** Combined 1F1B of the language model (--overlap-moe-expert-parallel-comm); default: off. */
	readonly overlap?: { readonly earlyRelease: boolean } | null;
	/** ZeRO-1; default: off. */
	readonly distributedOptimizer?: boolean;
	/** Dtype in which gradients are reduced over replicas; default f32. */
	readonly gradientSums?: FloatDtype;
	/**
	 * Buckets of a module with `replicas` data-parallel ranks whose reductions overlap with backward; null, and by default: no
	 * overlap.
	 */
	readonly buckets?: (module: string, replicas: number) => BucketSize | null;
	/** Default: none. */
	readonly guests?: readonly Guest[];
	/** Rows that are reserved for a rank's experts; default: as many as can ever be routed there. */
	readonly expertCapacity?: ExpertCapacity;
	/** Token dispatcher, or what to choose it by; default: alltoall. */
	readonly dispatcher?: Dispatcher | DispatcherChoice;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}
