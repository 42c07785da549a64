/**
 * Gradient bucketing by the configuration: bucket sizes, and whether reductions overlap with backward (docs/spec/runtime.md
 * §3.6).
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import { type BucketSize, languageModule } from "../parallel/index.ts";

/** Megatron's default bucket size in elements, for `replicas` data-parallel ranks. */
function usualElements(replicas: number): number {
	return Math.max(40e6, 1e6 * replicas);
}

/** Buckets of a module whose reductions overlap with backward; null: gradients are reduced after backward, in one piece. */
export function gradientBuckets(
	c: Pick<TrainingConfiguration, "ddpBucketSize" | "ddpNumBuckets" | "encoderDdpOverlap" | "overlapGradReduce">,
	module: string,
	replicas: number,
): BucketSize | null {
	if (!c.overlapGradReduce || (module !== languageModule && !c.encoderDdpOverlap)) return null;
	if (c.ddpNumBuckets !== null) return { count: c.ddpNumBuckets };
	return { elements: c.ddpBucketSize ?? usualElements(replicas) };
}
