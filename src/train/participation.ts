/**
 * --encoder-grad-participation: the encoder's gradient if some of its ranks saw no image in a step (docs/spec/runtime.md §3.7).
 * exact: the gradient of the mean loss. corrected: multiplied by ranks / participants, as Megatron offers.
 */
import { featuresOf, type ImageTextMicrobatch } from "../data/microbatch.ts";
import type { ParticipationResult } from "../observe/step-report.ts";
import { gradientSquares, scaleGradients } from "../optim/gradient-norm.ts";
import type { StepScalars } from "../optim/step-scalars.ts";
import type { DataParallel, Group } from "../parallel/index.ts";
import { Tensor } from "../tensor/index.ts";

/** The policy and this rank's part in it; every rank of the run takes part. */
export interface Participation {
	readonly policy: "exact" | "corrected";
	/** Data-parallel ranks of the encoder. */
	readonly ranks: number;
	/** The encoder's parameters; null on ranks without them. */
	readonly replica: DataParallel | null;
	/** Participants among the encoder ranks that this rank votes for: those that saw an image in the step's microbatches. */
	readonly votes: (microbatches: readonly ImageTextMicrobatch[]) => number;
}

/** A step's participation before its global norm is known. */
export interface Participated extends Pick<Participation, "policy" | "ranks"> {
	readonly participants: number;
	/** Σ g² of the encoder's exact gradient over all its ranks. */
	readonly squares: number;
	/** Whether the correction was applied to this rank's gradients. */
	readonly changed: boolean;
}

/** The vote of a rank of `encoder` for itself. */
export function sawImages(encoder: string): Participation["votes"] {
	return (microbatches) => (microbatches.some((batch) => featuresOf(batch, encoder).grids.length > 0) ? 1 : 0);
}

/** The correction factor ranks / participants; 1 without participants. */
function participationFactor(participants: number, ranks: number): number {
	return participants > 0 && participants < ranks ? ranks / participants : 1;
}

/**
 * Counts the participants, and corrects the encoder's gradient under the corrected policy. `scale`: factor by which the update
 * will multiply gradients.
 */
export function participate(
	{ policy, ranks, replica, votes }: Participation,
	microbatches: readonly ImageTextMicrobatch[],
	scalars: StepScalars,
	scale: number,
	world: Group,
): Participated {
	const own = [votes(microbatches), replica ? gradientSquares([replica], scalars) * scale ** 2 : 0];
	using sums = Tensor.from(scalars.device, Float64Array.from(own));
	world.allReduce(sums).wait();
	const totals = new Float64Array(2);
	scalars.device.copyToHost(totals, sums);
	const [participants, squares] = totals as unknown as [number, number];
	const factor = participationFactor(participants, ranks);
	const changed = policy === "corrected" && replica !== null && factor !== 1;
	if (changed) scaleGradients([replica], scalars, factor);
	return { policy, participants, ranks, squares, changed };
}

/** Computes the norms under both policies from the current policy's norm. */
export function withNorms({ policy, participants, ranks, squares }: Participated, norm: number): ParticipationResult {
	const change = (participationFactor(participants, ranks) ** 2 - 1) * squares;
	const other = Math.sqrt(Math.max(0, norm ** 2 + (policy === "exact" ? change : -change)));
	const [exactNorm, correctedNorm] = policy === "exact" ? [norm, other] : [other, norm];
	return { participants, ranks, exactNorm, correctedNorm };
}
