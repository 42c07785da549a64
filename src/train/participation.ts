/**
 * What becomes of the encoder's gradient when some of its ranks saw no image in a step (spec runtime 3.7). exact: nothing,
 * the gradient stays that of the token mean. corrected: it is multiplied by ranks / participants, as upstream offers.
 */
import type { DataParallel } from "../parallel/data-parallel.ts";

export interface EncoderCorrection<Batch> {
	/** The encoder's parameters. */
	readonly replica: DataParallel;
	/** Factor of the step's gradients, from this rank's microbatches. */
	readonly factor: (microbatches: readonly Batch[]) => number;
}

/** `participants`: data-parallel ranks of the encoder with an image in any microbatch of the step. */
export function participationFactor(participants: number, ranks: number): number {
	return participants > 0 && participants < ranks ? ranks / participants : 1;
}
