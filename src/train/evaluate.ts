/** Evaluation: losses without dropout, and without counting tokens in routers. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { Evaluation } from "../guests/guest.ts";
import { Losses, languageModelLoss, meansOf } from "./losses.ts";
import type { MicrobatchObserver } from "./rank-passes.ts";
import type { TrainingState } from "./step-state.ts";

/** The part of the training state that an evaluation uses. */
export type EvaluationState = Pick<TrainingState, "world" | "passes" | "lossOwner" | "lossNames" | "scalars">;

/**
 * Mean of every loss over the microbatches of all ranks. Collective over the world. `part`: the part of the language model that
 * runs; default: all of it.
 */
export function evaluate(
	{ scalars, world, passes, lossOwner, lossNames }: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	observe?: MicrobatchObserver,
	part: Evaluation | null = null,
): { losses: Readonly<Record<string, number>>; tokens: number } {
	const names = lossNames.filter(({ trainingOnly }) => !trainingOnly);
	using losses = new Losses(scalars.device, lossOwner, names);
	using variants = part?.variants(passes.parts.guests, microbatches.length) ?? null;
	passes.evaluate(microbatches, losses, observe, variants?.microbatches);
	const totals = losses.totals(world);
	return { losses: meansOf(totals), tokens: totals.get(languageModelLoss)!.tokens };
}

/** The models that an evaluation runs. */
export interface Evaluations {
	/** Whether the language model itself is evaluated. */
	readonly whole: boolean;
	readonly parts: readonly Evaluation[];
}

/**
 * All losses of the model itself, or of the first part if that is not evaluated, and the language model loss of every part
 * under its label.
 */
export function evaluateAll(
	state: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	{ whole, parts }: Evaluations,
): Readonly<Record<string, number>> {
	const all = whole ? evaluate(state, microbatches).losses : null;
	const each = parts.map((part) => evaluate(state, microbatches, undefined, part).losses);
	const byLabel = parts.map(({ label }, at) => [`lm loss (${label})`, each[at]![languageModelLoss]!]);
	return { ...(all ?? each[0]), ...Object.fromEntries(byLabel) };
}
