/** Records of the submodel of every budget, for a log and `mimo elastic list`. */
import type { LayerKind } from "../../../config/hybrid-pattern.ts";
import type { HybridConfig } from "../../../models/language/config.ts";
import type { BudgetRecord } from "../../../observe/run-log/family.ts";
import type { AxisName } from "../axes.ts";
import { countParameters, type Sizes } from "../counts.ts";
import { sizesOfBudget, type TrainedRouter } from "./family.ts";

/** The configuration's names of sizes, in the order in which they are shown. */
const names: Readonly<Record<AxisName, string>> = {
	emb: "hidden-size",
	skip_layer: "layers",
	mamba: "mamba-num-heads",
	head: "num-attention-heads",
	moe_expert: "num-experts",
	mlp: "moe-ffn-hidden-size",
};

/** Of every budget, largest first. `losses`: the language model's by the name that evaluations give it. */
export function budgetRecords(
	router: TrainedRouter,
	model: HybridConfig,
	losses: Readonly<Record<string, number>>,
): BudgetRecord[] {
	return router.config.budgets.map((budget) =>
		recordOf(
			model,
			router.config.axes.map(({ name }) => name),
			sizesOfBudget(router, model, budget),
			{ budget, loss: losses[budgetLossKey(budget)] ?? null },
		),
	);
}

/** The name under which an evaluation reports a budget's loss. */
function budgetLossKey(budget: number): string {
	return `lm loss (budget ${budget})`;
}

/** Of a submodel with these sizes: the axes that are named, means where layers differ. */
export function recordOf(
	model: HybridConfig,
	axes: readonly AxisName[],
	sizes: Sizes,
	about: Pick<BudgetRecord, "budget" | "loss">,
): BudgetRecord {
	const count = (target: "total" | "active") => countParameters(model, sizes, target).value;
	return {
		...about,
		total: count("total"),
		active: count("active"),
		sizes: Object.fromEntries(
			(Object.keys(names) as AxisName[])
				.filter((axis) => axes.includes(axis))
				.map((axis) => [names[axis], sizeOf(model, axis, sizes)]),
		),
	};
}

function sizeOf({ pattern }: HybridConfig, axis: AxisName, sizes: Sizes): number {
	const mean = (kind: LayerKind, list: readonly number[]) => {
		const own = list.filter((_, layer) => pattern[layer] === kind && sizes.keep[layer]! > 0);
		return own.reduce((sum, size) => sum + size, 0) / Math.max(1, own.length);
	};
	switch (axis) {
		case "emb":
			return sizes.hidden;
		case "mamba":
			return mean("mamba", sizes.mambaHeads);
		case "head":
			return mean("attention", sizes.heads);
		case "moe_expert":
			return mean("moe", sizes.experts);
		case "mlp":
			return mean("moe", sizes.ffn);
		case "skip_layer":
			return sizes.keep.reduce((sum, keep) => sum + keep, 0);
	}
}
