/**
 * What becomes of the encoder's gradient when some of its ranks saw no image in a step (spec runtime 3.7). exact: nothing,
 * the gradient stays that of the token mean. corrected: it is multiplied by ranks / participants, as upstream offers.
 */
import type { DataParallel } from "../parallel/data-parallel.ts";

/** The policy of a run and this rank's part in it. Every rank of the run has one, and all join in. */
export interface Participation {
	readonly policy: "exact" | "corrected";
	/** Data-parallel ranks of the encoder. */
	readonly ranks: number;
	/** The encoder's parameters; null on ranks of the language model. */
	readonly replica: DataParallel | null;
	/** Of the encoder ranks that see the same images, one votes. */
	readonly votes: boolean;
}

/** What a step says of it. */
export interface ParticipationResult {
	/** Data-parallel ranks of the encoder with an image in any microbatch of the step, and all of them. */
	readonly participants: number;
	readonly ranks: number;
	/** Global gradient norms with the one and with the other policy. */
	readonly exactNorm: number;
	readonly correctedNorm: number;
}

/** `participants`: data-parallel ranks of the encoder with an image in any microbatch of the step. */
export function participationFactor(participants: number, ranks: number): number {
	return participants > 0 && participants < ranks ? ranks / participants : 1;
}
