/**
 * The submodels of an elastic training over steps, from the events "budgets" of a log: the sizes that the router chooses for every
 * budget, its parameters, and its loss.
 */

import { Series } from "../series.ts";
import type { RunEvent } from "../step-report.ts";

/** A budget in an event. */
export interface BudgetRecord {
	readonly budget: number;
	/** Sizes by configuration key, means over layers; "layers": number of kept layers. */
	readonly sizes: Readonly<Record<string, number>>;
	/** Number of parameters, in total and active for a token. */
	readonly total: number;
	readonly active: number;
	/** Loss of held-out tokens; null: not measured. */
	readonly loss: number | null;
}

/** The series of a budget. */
export interface LoggedBudget {
	readonly budget: number;
	readonly sizes: Map<string, Series>;
	readonly loss: Series;
	total: number;
	active: number;
}

/** The event with the budgets after `step` steps. */
export function familyEvent(step: number, budgets: readonly BudgetRecord[]): RunEvent {
	const parts = budgets.map(
		({ budget, active, loss }) =>
			`budget ${budget}: ${(active / 1e6).toPrecision(3)} M active parameters${loss === null ? "" : `, loss ${loss.toFixed(4)}`}`,
	);
	return { kind: "budgets", step, sentence: parts.join("; "), details: { budgets } };
}

/** Adds the budgets of an event to those of the log. Records of another form are ignored. */
export function addFamily(family: Map<number, LoggedBudget>, step: number, budgets: unknown): void {
	if (!Array.isArray(budgets)) return;
	for (const record of budgets as readonly Partial<BudgetRecord>[]) {
		const { budget, sizes, total, active, loss } = record ?? {};
		if (typeof budget !== "number" || typeof sizes !== "object" || sizes === null) continue;
		if (!family.has(budget)) family.set(budget, { budget, sizes: new Map(), loss: new Series(), total: 0, active: 0 });
		const own = family.get(budget)!;
		if (typeof total === "number") own.total = total;
		if (typeof active === "number") own.active = active;
		// The last event of a step counts: at its end a training measures all held-out tokens.
		for (const series of [own.loss, ...own.sizes.values()]) series.rewind(step);
		if (typeof loss === "number") own.loss.add(step, loss);
		for (const [axis, size] of Object.entries(sizes)) {
			if (!own.sizes.has(axis)) own.sizes.set(axis, new Series());
			own.sizes.get(axis)!.add(step, size);
		}
	}
}

/** Every series of a family. */
export function seriesOfFamily(family: ReadonlyMap<number, LoggedBudget>): Series[] {
	return [...family.values()].flatMap(({ sizes, loss }) => [...sizes.values(), loss]);
}
