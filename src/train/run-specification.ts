/** Modules and options of a run, as assemble() takes them. */
import type { ElasticConfig } from "../elastic/config.ts";
import type { Draw } from "../elastic/router/network.ts";
import type { HybridConfig } from "../models/hybrid/config.ts";
import type { Segment } from "../models/hybrid/segments.ts";
import type { EncoderConfig } from "../models/vision/encoder.ts";
import type { AdamWOptions } from "../optim/adamw.ts";
import type { ExpertCapacity } from "../parallel/experts/capacity.ts";
import type { Dispatcher } from "../parallel/experts/members.ts";
import type { BucketSize } from "../parallel/parameter-set.ts";
import type { Chunk } from "../schedule/actions.ts";
import type { FloatDtype } from "../tensor/tensor.ts";
import type { DistillationOptions } from "./distillation.ts";
import type { PrefetchOptions } from "./feature-prefetch.ts";
import type { Participation } from "./participation.ts";

/** The modules that a run trains, and the options of its training. */
export interface RunSpecification {
	/** null: the language model alone. */
	readonly encoder: EncoderConfig | null;
	readonly language: HybridConfig;
	/** Runs of layers that a pipeline stage passes at once, in order, a multiple of the stages; default: one, all layers. */
	readonly segments?: readonly Segment[];
	/** Microbatches that pass a stage's segment before its next one has its turn; default: as many as stages. */
	readonly microbatchGroup?: number | null;
	/** The language model is an elastic parent; absent or null: it is not. */
	readonly elastic?: ElasticSpecification | null;
	/** The language model learns from a teacher of the same sizes; absent or null: from labels alone. */
	readonly distillation?: DistillationOptions | null;
	/** Stands for image rows in the text; null without an encoder. */
	readonly imageTokenId: number | null;
	readonly frozen: { readonly tower: boolean; readonly projector: boolean; readonly language: boolean };
	readonly adam: AdamWOptions;
	readonly clipGrad: number;
	readonly seed: number;
	/** Whether the language model's stages leave gradients of their weights for the time in which they wait; default: not. */
	readonly lateWeightGradients?: boolean;
	/** Passes of the language model take turns while experts' rows are exchanged; default: not. */
	readonly overlap?: { readonly earlyRelease: boolean } | null;
	/** ZeRO-1; default: not. */
	readonly distributedOptimizer?: boolean;
	/** Type in which gradients are summed over replicas; default fp32. */
	readonly gradientSums?: FloatDtype;
	/** Buckets of a module of so many replicas whose sums start during backward; null, and by default: after it, whole. */
	readonly buckets?: (module: Chunk["module"], replicas: number) => BucketSize | null;
	/** Whether the encoder's lanes encode what they have read, or share images by what they cost; default: what they read. */
	readonly encoderBalance?: "number" | "cost";
	/** Default: the exact gradient. */
	readonly participation?: Pick<Participation, "policy">;
	/** A frozen tower runs ahead; absent or null: it does not. */
	readonly prefetch?: PrefetchOptions | null;
	/** Room for rows of a rank's experts; default: for as many rows as can come. */
	readonly expertCapacity?: ExpertCapacity;
	/** Way of experts' rows to other ranks; default: a row for each expert. */
	readonly dispatcher?: Dispatcher;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

export interface ElasticSpecification {
	readonly config: ElasticConfig;
	/**
	 * Draws repeat after so many microbatches of a lane and are the same in all lanes, so that layouts of different lanes can
	 * be compared; default: every microbatch, and every set of lanes that shares experts, has its own.
	 */
	readonly period?: number;
	/** The draw of a microbatch in place of the random one, by iteration and microbatch of the lane. */
	readonly draw?: (iteration: number, microbatch: number) => Draw;
}
