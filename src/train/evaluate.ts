/** The loss without training: dropout is off, routers do not count. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { Losses, languageModelLoss } from "./losses.ts";
import type { MicrobatchObserver } from "./rank-passes.ts";
import type { TrainingState } from "./step.ts";

/** What evaluation needs of a training's state. */
export type EvaluationState = Pick<TrainingState, "world" | "passes" | "lossOwner" | "scalars">;

/** Mean loss of a token over the microbatches of every rank; all call this together. */
export function evaluate(
	{ scalars, world, passes, lossOwner }: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	observe?: MicrobatchObserver,
): { loss: number; tokens: number } {
	using losses = new Losses(scalars.device, lossOwner);
	passes.evaluate(microbatches, losses, observe);
	const { sum, tokens } = losses.totals(world).get(languageModelLoss)!;
	return { loss: sum / Math.max(1, tokens), tokens };
}
