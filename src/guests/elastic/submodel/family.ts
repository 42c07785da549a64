/** The submodels that a trained router chooses: one for every budget, without noise (docs/spec/elastic.md §3, §16). */
import {
	decodeFloats,
	readTensor,
	type SourceCheckpoint,
	type TensorStore,
	typeOf,
} from "../../../checkpoint/index.ts";
import type { LayerKind } from "../../../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../../../config/schema.ts";
import type { HybridConfig } from "../../../models/language/config.ts";
import type { BudgetRecord } from "../../../observe/run-log/family.ts";
import { UserError } from "../../../system/errors.ts";
import { exitCodes } from "../../../system/exit-codes.ts";
import type { AxisName } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import { countParameters, type Sizes } from "../counts.ts";
import { elasticConfig } from "../from-configuration.ts";
import { expectedSizes } from "../router/budget-loss.ts";
import { type GateWeights, gateName, sampleAxis, withoutNoise } from "../router/network.ts";
import type { Submodel } from "./submodel.ts";

/** A trained router: its axes and budgets, and the weights of its networks. */
export interface TrainedRouter {
	readonly config: ElasticConfig;
	readonly weights: ReadonlyMap<AxisName, GateWeights>;
}

/** The router in a checkpoint. `model`: of the checkpoint. Throws a UserError where the checkpoint has no router, or a router of another family. */
export function routerOf({ path, model: keys, weights }: SourceCheckpoint, model: HybridConfig): TrainedRouter {
	if (keys.flextron === true && keys.budgetList === undefined) {
		throw new UserError(`${path} has an elastic router, and does not say its budgets and sizes.`);
	}
	const config = keys.flextron === true ? elasticConfig(keys as unknown as TrainingConfiguration, model, 1) : null;
	if (config === null) {
		throw new UserError(
			`${path} has no elastic router: it is no checkpoint of a training with --flextron --enable-router.`,
		);
	}
	const read = (name: string) => readGate(weights, name);
	return {
		config,
		weights: new Map(
			config.axes.map((axis) => [axis.name, { first: read(gateName(axis, 0)), second: read(gateName(axis, 2)) }]),
		),
	};
}

function readGate(weights: TensorStore, name: string): Float64Array {
	const { dtype } = typeOf(weights, name);
	// Megatron's are in the type of the run.
	if (dtype !== "F32" && dtype !== "BF16") {
		throw new UserError(`${weights.path}: ${name} is ${dtype}; a router's weights are F32 or BF16.`);
	}
	const values = readTensor(weights, name);
	return Float64Array.from(decodeFloats(dtype, new Uint8Array(values.buffer, values.byteOffset, values.byteLength)));
}

/** Sizes that the router likes best for a budget. */
export function sizesOfBudget({ config, weights }: TrainedRouter, model: HybridConfig, budget: number): Sizes {
	const draw = withoutNoise({ value: budget, parent: config.budget.type === "param" && budget === 1 });
	const last = Math.max(0, (config.scale?.iterations ?? 1) - 1);
	const sample = new Map(
		config.axes.map((axis) => [axis.name, sampleAxis(config, axis, weights.get(axis.name)!, last, draw)]),
	);
	return expectedSizes(config, model, sample);
}

/** Its submodel. Throws a UserError for a budget beyond those that the router was trained for. */
export function submodelOfBudget(router: TrainedRouter, model: HybridConfig, budget: number): Submodel {
	const { budgets, budget: kind } = router.config;
	const most = kind.type === "param" ? Math.max(1, ...budgets) : Math.max(...budgets);
	const least = Math.min(...budgets);
	if (!(budget >= least && budget <= most)) {
		throw new UserError(
			`The budget ${budget} is none that the router was trained for: allowed is ${least} to ${most}${kind.type === "mem" ? " GB" : ""}.`,
			exitCodes.usage,
		);
	}
	return submodelOfSizes(model, sizesOfBudget(router, model, budget));
}

export function submodelOfSizes({ pattern }: HybridConfig, sizes: Sizes): Submodel {
	const of = (kind: LayerKind, list: readonly number[]) => list.filter((_, layer) => pattern[layer] === kind);
	return {
		hiddenSize: sizes.hidden,
		mambaNumHeads: of("mamba", sizes.mambaHeads),
		moeFfnHiddenSize: of("moe", sizes.ffn),
		numMoeExperts: of("moe", sizes.experts),
		numAttentionHeads: of("attention", sizes.heads),
		keptLayers: sizes.keep.map((keep) => keep > 0),
	};
}

// Records of the submodel of every budget, for a log and `mimo elastic list`.

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
