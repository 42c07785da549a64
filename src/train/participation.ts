/**
 * Policies for the encoder's gradient when some of its ranks saw no image in a step (docs/spec/runtime.md §3.7). exact:
 * the gradient stays that of the token mean. corrected: it is multiplied by ranks / participants, as Megatron offers.
 */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { gradientSquares, scaleGradients } from "../optim/gradient-norm.ts";
import type { StepScalars } from "../optim/step-scalars.ts";
import type { DataParallel } from "../parallel/data-parallel.ts";
import type { Group } from "../parallel/group.ts";
import { Tensor } from "../tensor/tensor.ts";

/** A run's policy as one of its ranks carries it out. Every rank of the run has one, and all join in. */
export interface Participation {
	readonly policy: "exact" | "corrected";
	/** Data-parallel ranks of the encoder. */
	readonly ranks: number;
	/** The encoder's parameters; null on ranks without them. */
	readonly replica: DataParallel | null;
	/** Number of ranks for which this rank votes that saw an image in a step's microbatches. */
	readonly votes: (microbatches: readonly ImageTextMicrobatch[]) => number;
}

/** The participation of one step, as it is reported. */
export interface ParticipationResult {
	/** Data-parallel ranks of the encoder with an image in any microbatch of the step, and all of them. */
	readonly participants: number;
	readonly ranks: number;
	/** Global gradient norms with the one and with the other policy. */
	readonly exactNorm: number;
	readonly correctedNorm: number;
}

/** The participation of a step whose global norm is not known yet. */
export interface Participated extends Pick<Participation, "policy" | "ranks"> {
	readonly participants: number;
	/** Σ g² of the encoder's exact gradient over all its ranks. */
	readonly squares: number;
	/** Whether gradients of this rank were changed. */
	readonly changed: boolean;
}

/** The vote of a rank that speaks for itself. */
export function sawImages(microbatches: readonly ImageTextMicrobatch[]): number {
	return microbatches.some(({ images }) => images.grids.length > 0) ? 1 : 0;
}

/** `participants`: data-parallel ranks of the encoder with an image in any microbatch of the step. */
function participationFactor(participants: number, ranks: number): number {
	return participants > 0 && participants < ranks ? ranks / participants : 1;
}

/**
 * Counts the encoder ranks that saw images, and corrects the encoder's gradient where the policy says so. `scale`: factor by which
 * the update will multiply gradients.
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

/** The norms under both policies from that of the one in force. */
export function withNorms({ policy, participants, ranks, squares }: Participated, norm: number): ParticipationResult {
	const change = (participationFactor(participants, ranks) ** 2 - 1) * squares;
	const other = Math.sqrt(Math.max(0, norm ** 2 + (policy === "exact" ? change : -change)));
	const [exactNorm, correctedNorm] = policy === "exact" ? [norm, other] : [other, norm];
	return { participants, ranks, exactNorm, correctedNorm };
}
