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
import { UserError } from "../../../system/errors.ts";
import { exitCodes } from "../../../system/exit-codes.ts";
import type { AxisName } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import type { Sizes } from "../counts.ts";
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
