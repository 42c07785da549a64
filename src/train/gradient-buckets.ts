/**
 * Sizes of gradient buckets, and whether they are reduced while backward runs, by the configuration
 * (docs/spec/runtime.md §3.6).
 */
import type { TrainingConfiguration } from "../config/schema.ts";
import type { BucketSize } from "../parallel/parameter-set.ts";

/** Elements of a bucket by Megatron's rule, for `replicas` ranks that share a module's gradients. */
function usualElements(replicas: number): number {
	return Math.max(40e6, 1e6 * replicas);
}

/** Buckets of a module whose reduction overlaps with backward; null: gradients are reduced afterwards, in one piece. */
export function gradientBuckets(
	c: Pick<TrainingConfiguration, "ddpBucketSize" | "ddpNumBuckets" | "encoderDdpOverlap" | "overlapGradReduce">,
	module: "encoder" | "language",
	replicas: number,
): BucketSize | null {
	if (!c.overlapGradReduce || (module === "encoder" && !c.encoderDdpOverlap)) return null;
	if (c.ddpBucketSize !== null) return { elements: c.ddpBucketSize };
	return c.ddpNumBuckets === null ? { elements: usualElements(replicas) } : { count: c.ddpNumBuckets };
}
