/** An elastic model: its axes, its router and its budgets (docs/spec/elastic.md §2–§8). */
import type { Axis } from "./axes.ts";
import type { CountRule, CountTarget } from "./counts.ts";
import type { MemoryUse } from "./memory.ts";

/** Quantity that a budget limits: a share of the parent's parameters, or GB of memory. */
export type BudgetKind =
	| { readonly type: "param"; readonly target: CountTarget }
	| { readonly type: "mem"; readonly use: MemoryUse };

export interface ElasticConfig {
	/** In the order of axisNames; an axis without layers in the model is absent. */
	readonly axes: readonly Axis[];
	/** Layers of the main part that may be left out, least important first. */
	readonly ranking: readonly number[];
	/** Descending. */
	readonly budgets: readonly number[];
	/** Relative probability of each budget; null: uniform. */
	readonly budgetProbabilities: readonly number[] | null;
	/** Probability of the parent's own budget. */
	readonly parentProbability: number;
	readonly budget: BudgetKind;
	readonly router: {
		/** Hidden width of an axis's network. */
		readonly width: number;
		readonly standardDeviation: number;
		/** Whether logits are divided by their standard deviation. */
		readonly normalise: boolean;
		readonly frozen: boolean;
		/** Multiplier of the learning rate. */
		readonly learningRateMultiplier: number;
	};
	/** The logits' factor runs from `start` to `end` over so many iterations; null: 1. */
	readonly scale: { readonly start: number; readonly end: number; readonly iterations: number } | null;
	readonly temperature: { readonly initial: number; readonly decay: number };
	/** A sample is one-hot when a uniform number is above this. */
	readonly hardThreshold: number;
	/** Whether masks are weighted by probabilities rather than those of the chosen sizes. */
	readonly softMask: boolean;
	/** Weight of a token's budget loss beside the language model's. */
	readonly lossWeight: number;
	/** Whether to follow Megatron where this program differs (docs/spec/elastic.md §9). */
	readonly compat: boolean;
	/** Keys of budgets and noise are drawn from this. */
	readonly seed: number;
}

export function countRule({ compat }: Pick<ElasticConfig, "compat">): CountRule {
	return compat ? "megatron" : "exact";
}
