/** The budget loss: distance of a sample's expected sizes from its budget (docs/spec/elastic.md §8). */
import type { HybridConfig } from "../../../models/language/config.ts";
import { type AxisName, rowsOf } from "../axes.ts";
import { countRule, type ElasticConfig } from "../config.ts";
import { countParameters, type Differentiable, emptySizes, parentSizes, type Sizes } from "../counts.ts";
import { memoryOf } from "../memory.ts";
import type { AxisSample, DrawnBudget, RouterSample } from "./network.ts";

/** A relative difference below this counts as none. */
const deadBand = 0.05;
const identityWeight = 10;

/** The sizes' key that an axis sets. */
const sizeKey: Readonly<Record<Exclude<AxisName, "emb" | "skip_layer">, "ffn" | "mambaHeads" | "experts" | "heads">> = {
	mlp: "ffn",
	mamba: "mambaHeads",
	moe_expert: "experts",
	head: "heads",
};

export interface BudgetLoss {
	readonly value: number;
	/** By axis, [rows, choices]. */
	readonly gradient: ReadonlyMap<AxisName, Float64Array>;
	readonly expected: Sizes;
}

/** Usage that is compared with a budget: parameters relative to the parent's, or GB. */
export function usageOf(config: ElasticConfig, model: HybridConfig, sizes: Sizes): Differentiable {
	const rule = countRule(config);
	if (config.budget.type === "mem") return memoryOf(model, sizes, config.budget.use, rule);
	const { target } = config.budget;
	const parent = countParameters(model, parentSizes(model), target, rule).value;
	const { value, gradient } = countParameters(model, sizes, target, rule);
	return { value: value / parent, gradient: scaled(gradient, 1 / parent) };
}

/** The parent's own budget: 1, or its memory in GB. */
export function parentBudget(config: ElasticConfig, model: HybridConfig): number {
	return config.budget.type === "param" ? 1 : usageOf(config, model, parentSizes(model)).value;
}

/** Expectations of all sizes under a sample's probabilities. */
export function expectedSizes(config: ElasticConfig, model: HybridConfig, sample: RouterSample): Sizes {
	const sizes = parentSizes(model);
	for (const one of sample.values()) {
		const { axis, probabilities } = one;
		const means = rowMeans(one, axis.sizes);
		if (axis.name === "emb") sizes.hidden = means[0]!;
		else if (axis.name === "skip_layer") {
			for (const [at, layer] of config.ranking.entries()) sizes.keep[layer] = keepOf(probabilities, at);
		} else {
			const list = sizes[sizeKey[axis.name]];
			for (let layer = 0; layer < list.length; layer++) {
				const row = axis.layers === null ? 0 : axis.layers.indexOf(layer);
				if (row >= 0) list[layer] = means[row]!;
			}
		}
	}
	return sizes;
}

/** Probability that the layer at a place of the ranking stays: choice c leaves the first c out. */
function keepOf(probabilities: Float64Array, place: number): number {
	return probabilities.subarray(0, place + 1).reduce((sum, p) => sum + p, 0);
}

export function budgetLoss(
	config: ElasticConfig,
	model: HybridConfig,
	budget: DrawnBudget,
	sample: RouterSample,
): BudgetLoss {
	const expected = expectedSizes(config, model, sample);
	const usage = usageOf(config, model, expected);
	const ratio = usage.value / budget.value - 1;
	const counts = budget.parent || Math.abs(ratio) >= deadBand;
	const outer = counts ? Math.sign(ratio) / budget.value : 0;
	let value = counts ? Math.abs(ratio) : 0;
	const gradient = new Map<AxisName, Float64Array>();
	for (const [name, one] of sample) {
		const d = sizesToProbabilities(config, one, usage.gradient).map((x) => outer * x);
		if (budget.parent) value += identityTerm(one, d);
		gradient.set(name, d);
	}
	return { value, gradient, expected };
}

/** The mean squared distance from the parent's choice, times its weight; adds its gradient. */
function identityTerm({ axis, probabilities }: AxisSample, d: Float64Array): number {
	const entries = probabilities.length;
	const choices = axis.sizes.length;
	return probabilities.reduce((sum, p, at) => {
		const off = p - (at % choices === 0 ? 1 : 0);
		d[at]! += (2 * identityWeight * off) / entries;
		return sum + (identityWeight * off * off) / entries;
	}, 0);
}

/** From the gradient of sizes to that of an axis's probabilities. */
function sizesToProbabilities(config: ElasticConfig, { axis }: AxisSample, gradient: Sizes): Float64Array {
	const choices = axis.sizes.length;
	const d = new Float64Array(rowsOf(axis) * choices);
	if (axis.name === "emb") return d.map((_, at) => gradient.hidden * axis.sizes[at]!);
	if (axis.name === "skip_layer") {
		for (const [at, layer] of config.ranking.entries())
			for (let choice = 0; choice <= at; choice++) d[choice]! += gradient.keep[layer]!;
		return d;
	}
	for (const [layer, slope] of gradient[sizeKey[axis.name]].entries()) {
		const row = axis.layers === null ? 0 : axis.layers.indexOf(layer);
		if (row < 0) continue;
		for (const [choice, size] of axis.sizes.entries()) d[row * choices + choice]! += slope * size;
	}
	return d;
}

function rowMeans({ axis, probabilities }: AxisSample, sizes: readonly number[]): number[] {
	const choices = axis.sizes.length;
	return Array.from({ length: rowsOf(axis) }, (_, row) =>
		sizes.reduce((sum, size, k) => sum + size * probabilities[row * choices + k]!, 0),
	);
}

function scaled(sizes: Sizes, factor: number): Sizes {
	const result = emptySizes(sizes.keep.length);
	result.hidden = factor * sizes.hidden;
	for (const key of ["mambaHeads", "ffn", "experts", "heads", "keep"] as const)
		for (const [at, x] of sizes[key].entries()) result[key][at] = factor * x;
	return result;
}
