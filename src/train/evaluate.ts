/** The loss without training: dropout is off, routers do not count. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { type DrawnBudget, withoutNoise } from "../elastic/router/network.ts";
import { isTrainingOnlyLoss, Losses, languageModelLoss, meansOf } from "./losses.ts";
import type { MicrobatchObserver } from "./rank-passes.ts";
import type { TrainingState } from "./step.ts";

/** The part of a training's state that evaluation needs. */
export type EvaluationState = Pick<
	TrainingState,
	"world" | "passes" | "lossOwner" | "lossNames" | "scalars" | "elastic"
>;

/**
 * Means of every loss over the microbatches of every rank; all call this together. `budget`: of an elastic model, whose router
 * then takes the likeliest sizes; default: the parent.
 */
export function evaluate(
	{ scalars, world, passes, lossOwner, lossNames, elastic }: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	observe?: MicrobatchObserver,
	budget: DrawnBudget | null = null,
): { losses: Readonly<Record<string, number>>; tokens: number } {
	const names = lossNames.filter((name) => !isTrainingOnlyLoss(name));
	using losses = new Losses(scalars.device, lossOwner, names);
	const draws = budget && microbatches.map(() => withoutNoise(budget));
	using sampled = (draws && elastic?.router.sample(draws, Number.POSITIVE_INFINITY, { trains: false })) ?? null;
	passes.evaluate(microbatches, losses, observe, sampled?.microbatches);
	const totals = losses.totals(world);
	return { losses: meansOf(totals), tokens: totals.get(languageModelLoss)!.tokens };
}

/** The models that evaluations look at: the whole one, and submodels. */
export interface EvaluatedBudgets {
	/** The model as it is. */
	readonly parent: boolean;
	/** Budgets of an elastic model that are evaluated too. */
	readonly budgets: readonly DrawnBudget[];
}

/** Losses of the model as it is, or else of the first budget, and the language model's of every budget by its value. */
export function evaluateBudgets(
	state: EvaluationState,
	microbatches: readonly ImageTextMicrobatch[],
	{ parent, budgets }: EvaluatedBudgets,
): Readonly<Record<string, number>> {
	const whole = parent ? evaluate(state, microbatches).losses : null;
	const each = budgets.map((budget) => evaluate(state, microbatches, undefined, budget).losses);
	const byBudget = budgets.map(({ value }, at) => [`lm loss (budget ${value})`, each[at]![languageModelLoss]!]);
	return { ...(whole ?? each[0]), ...Object.fromEntries(byBudget) };
}
