/** The loss without training: dropout is off, routers do not count. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { Losses, languageModelLoss, meansOf } from "./losses.ts";
import type { MicrobatchObserver } from "./rank-passes.ts";
import type { TrainingState } from "./step.ts";

/** What evaluation needs of a training's state. */
export type EvaluationState = Pick<TrainingState, "world" | "passes" | "lossOwner" | "lossNames" | "scalars">;

/** Means of every loss over the microbatches of every rank; all call this together. */
export function evaluate(
	{ scalars, world, passes, lossOwner, lossNames }: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	observe?: MicrobatchObserver,
): { losses: Readonly<Record<string, number>>; tokens: number } {
	using losses = new Losses(scalars.device, lossOwner, lossNames);
	passes.evaluate(microbatches, losses, observe);
	const totals = losses.totals(world);
	return { losses: meansOf(totals), tokens: totals.get(languageModelLoss)!.tokens };
}
