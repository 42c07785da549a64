/** The elastic model that a training configuration describes, checked (docs/spec/elastic.md §2). */

import { parse } from "yaml";
import { plannedIterations } from "../../config/derive.ts";
import { layerSymbols } from "../../config/hybrid-pattern.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { hybridConfig } from "../../models/language/from-configuration.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { readWholeText } from "../../system/input-file.ts";
import {
	type Axis,
	type AxisName,
	axisNames,
	flagPrefix,
	layerKind,
	parentSize,
	rankingProblem,
	sizesOf,
	sizesProblem,
} from "./axes.ts";
import type { BudgetKind, ElasticConfig } from "./config.ts";
import { parentSizes, type Sizes } from "./counts.ts";
import { resolveProfile } from "./memory.ts";
import { usageOf } from "./router/budget-loss.ts";

/** The elastic model of a configuration; null if it has none. Throws a UserError that names the wrong key. */
export function elasticOf(c: TrainingConfiguration): ElasticConfig | null {
	// Commands that do not train have no number of iterations.
	const trains = c.trainIters !== null || c.trainSamples !== null;
	return c.flextron ? elasticConfig(c, hybridConfig(c), trains ? plannedIterations(c) : 1) : null;
}

const refuse = (sentence: string): never => {
	throw new UserError(sentence, exitCodes.usage);
};

/** null: the model is not elastic. `iterations`: those of the whole training. Throws a UserError that names the key. */
export function elasticConfig(c: TrainingConfiguration, model: HybridConfig, iterations: number): ElasticConfig | null {
	if (!c.flextron) return null;
	const ranking = c.layerRankingList ?? [];
	const problem = c.addSkipping ? rankingProblem(ranking, model.pattern.length) : null;
	if (problem !== null) refuse(`layer-ranking-list ${problem}.`);
	const order = c.budgetList.map((_, at) => at).sort((a, b) => c.budgetList[b]! - c.budgetList[a]!);
	const probabilities = c.budgetProbs;
	const config: ElasticConfig = {
		axes: axisNames.flatMap((name) => axisOf(c, model, name)),
		ranking,
		budgets: order.map((at) => c.budgetList[at]!),
		budgetProbabilities: probabilities && order.map((at) => probabilities[at]!),
		parentProbability: c.originalModelSampleProb,
		budget: budgetOf(c),
		router: {
			width: c.routerInterDim,
			standardDeviation: c.routerStd,
			normalise: c.normalizeRouterLogits,
			frozen: c.freezeRouter,
			learningRateMultiplier: c.lrMultRouter,
		},
		scale: { start: c.linearScalerStart, end: c.linearScalerEnd, iterations },
		temperature: { initial: c.tauInit, decay: c.tauDecay },
		hardThreshold: c.hardSampleTh,
		softMask: c.softMask,
		lossWeight: c.lossAlpha,
		compat: c.flextronCompat,
		seed: c.seed,
	};
	requireReachable(config, model);
	return config;
}

const lists = {
	emb: ["embIntList", "embPerList", null],
	mamba: ["mambaIntList", "mambaPerList", "flexHeteroMamba"],
	mlp: ["mlpIntList", "mlpPerList", "flexHeteroFfn"],
	moe_expert: ["moeExpertIntList", "moeExpertPerList", "flexHeteroMoeExpert"],
	head: ["headIntList", "headPerList", "flexHeteroHead"],
} as const;

/** The axis, or an empty list where the model has no layers of it, or where it is optional and not asked for. */
function axisOf(c: TrainingConfiguration, model: HybridConfig, name: AxisName): Axis[] {
	if (name === "skip_layer") {
		const left = (c.layerRankingList ?? []).length;
		return c.addSkipping ? [{ name, sizes: Array.from({ length: left + 1 }, (_, count) => count), layers: null }] : [];
	}
	const [ints, shares, hetero] = lists[name];
	const kind = layerKind[name];
	const layers = model.pattern.flatMap((symbol, layer) => (symbol === kind ? [layer] : []));
	const asked = c[ints] !== null || c[shares] !== null;
	if (kind !== null && layers.length === 0) {
		if (asked) refuse(`${flagPrefix[name]}-int-list: the pattern has no layer ${layerSymbols[kind]}.`);
		return [];
	}
	// Megatron's router has no network of heads.
	if (name === "head" && !asked) return [];
	const sizes = sizesOf(name, parentSize(model, name), { sizes: c[ints], ratios: c[shares] });
	const problem = sizesProblem(name, sizes, model, { expertTensor: c.llmExptTp });
	if (problem !== null) refuse(`${flagPrefix[name]}-${c[ints] === null ? "per" : "int"}-list ${problem}.`);
	return [{ name, sizes, layers: hetero !== null && c[hetero] ? layers : null }];
}

function budgetOf(c: TrainingConfiguration): BudgetKind {
	const own =
		c.memoryProfilePath === null ? null : readYaml(c.memoryProfilePath, `memory-profile-path ${c.memoryProfilePath}`);
	const overrides = {
		parameters: c.bpeParams,
		kvCache: c.bpeKvCache,
		ssmCache: c.bpeSsmCache,
		buffer: c.bpeMaxBuffer,
		target: c.paramBudgetTarget,
	};
	const profile = resolveProfile(c.memoryProfile, overrides, own, c.memoryProfilePath ?? undefined);
	if (c.budgetType === "param") return { type: "param", target: profile.target };
	const { memBatchSize: batchSize, memInferSeqLen: sequenceLength, prefillChunkSize: prefillChunk } = c;
	return { type: "mem", use: { profile, batchSize, sequenceLength, prefillChunk } };
}

/** The smallest and the largest usage that the axes reach. */
export function reach(config: ElasticConfig, model: HybridConfig): { readonly least: number; readonly most: number } {
	return {
		least: usageOf(
			config,
			model,
			chosenSizes(config, model, (axis) => axis.sizes.length - 1),
		).value,
		most: usageOf(config, model, parentSizes(model)).value,
	};
}

/** Sizes when every axis makes the choice that `choose` gives. */
function chosenSizes(config: ElasticConfig, model: HybridConfig, choose: (axis: Axis) => number): Sizes {
	const sizes = parentSizes(model);
	for (const axis of config.axes) {
		const size = axis.sizes[choose(axis)]!;
		if (axis.name === "emb") sizes.hidden = size;
		if (axis.name === "mamba") sizes.mambaHeads.fill(size);
		if (axis.name === "mlp") sizes.ffn.fill(size);
		if (axis.name === "moe_expert") sizes.experts.fill(size);
		if (axis.name === "head") sizes.heads.fill(size);
		if (axis.name === "skip_layer") for (const layer of config.ranking.slice(0, size)) sizes.keep[layer] = 0;
	}
	return sizes;
}

/** A budget outside of what the sizes reach by more than its loss forgives could never be met. */
function requireReachable(config: ElasticConfig, model: HybridConfig): void {
	const { least, most } = reach(config, model);
	const margin = 0.05;
	const outside = config.budgets.find((budget) => budget * (1 + margin) < least || budget * (1 - margin) > most);
	if (outside === undefined) return;
	const unit = config.budget.type === "mem" ? " GB" : "";
	refuse(`budget-list has ${outside}${unit}; the sizes reach ${least.toFixed(4)}${unit} to ${most.toFixed(4)}${unit}.`);
}

// YAML and JSON files that a command is given.

const LARGEST_FILE = 2 ** 24;

/** The file's content. `called`: the file in a sentence about it. Throws a UserError that names it. */
export function readYaml(path: string, called: string): unknown {
	const text = readWholeText(path, LARGEST_FILE, { called });
	try {
		return parse(text);
	} catch (error) {
		const reason = (error as Error).message.split("\n")[0]!.replace(/:$/, "");
		throw new UserError(`${path} is neither YAML nor JSON: ${reason}.`);
	}
}
