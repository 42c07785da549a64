/** Evaluation: losses without dropout, and without counting tokens in routers. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import { type DrawnBudget, withoutNoise } from "../elastic/router/network.ts";
import { isTrainingOnlyLoss, Losses, languageModelLoss, meansOf } from "./losses.ts";
import type { MicrobatchObserver } from "./rank-passes.ts";
import type { TrainingState } from "./step.ts";

/** The part of the training state that an evaluation uses. */
export type EvaluationState = Pick<
	TrainingState,
	"world" | "passes" | "lossOwner" | "lossNames" | "scalars" | "elastic"
>;

/**
 * Mean of every loss over the microbatches of all ranks. Collective over the world. `budget`: evaluates the submodel that the
 * elastic router chooses for it, without noise; default: the parent.
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

/** The models that an evaluation runs. */
export interface EvaluatedBudgets {
	/** Whether the model itself, an elastic model's parent, is evaluated. */
	readonly parent: boolean;
	/** Budgets of an elastic model whose submodels are evaluated. */
	readonly budgets: readonly DrawnBudget[];
}

/**
 * All losses of the model itself, or of the first budget if that is not evaluated, and the language model loss of every budget
 * under its name.
 */
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
