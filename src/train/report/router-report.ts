/** Collects a step's router statistics from all pipeline stages, on every rank of the language model. */

import { configOfLayer } from "../../models/language/config.ts";
import { kinds } from "../../models/language/kinds/index.ts";
import { allLayers } from "../../models/language/layer-numbering.ts";
import type { HybridModel } from "../../models/language/model.ts";
import { loggedName, routerLosses } from "../../models/language/router-state.ts";
import type { Group } from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";

/** Router losses by layer and Megatron's name: means over microbatches, before their coefficients. */
export type LossesByLayer = ReadonlyMap<number, Readonly<Record<string, number>>>;

/** Indices of the model's MoE layers. */
function layersOf({ config }: HybridModel): number[] {
	return allLayers(config).flatMap(({ index, kind }) => (kinds[kind].routes ? [index] : []));
}

/** Exchanges `widthOf` numbers of each MoE layer over `stages`, one rank a stage; `own` are those of this stage's layers. */
function overStages(
	model: HybridModel,
	stages: Group,
	own: ReadonlyMap<number, readonly number[]>,
	widthOf: (layer: number) => number,
): Map<number, number[]> {
	const layers = layersOf(model);
	const all = Float64Array.from(layers.flatMap((layer) => own.get(layer) ?? new Array<number>(widthOf(layer)).fill(0)));
	if (stages.size > 1 && all.length > 0) {
		using sums = Tensor.from(model.device, all);
		stages.allReduce(sums).wait();
		model.device.copyToHost(all, sums);
	}
	let end = 0;
	return new Map(
		layers.map((layer) => {
			end += widthOf(layer);
			return [layer, [...all.subarray(end - widthOf(layer), end)]];
		}),
	);
}

/**
 * Returns and resets the router losses of the step. Collective over the language model, after the update of the expert biases.
 */
export function takeRouterLosses(
	model: HybridModel,
	groups: { readonly routers: Group; readonly stages: Group },
	counts: { readonly microbatches: number; readonly tokens: number },
): LossesByLayer {
	const names = routerLosses(model.config.moe).map(loggedName);
	const own = new Map(
		[...model.routers].map(([layer, router]) => [
			layer,
			router.takeLosses(groups.routers, counts.microbatches, counts.tokens),
		]),
	);
	const all = overStages(model, groups.stages, own, () => names.length);
	return new Map(
		[...all].map(([layer, values]) => [layer, Object.fromEntries(names.map((name, i) => [name, values[i]!]))]),
	);
}

/** Tokens routed to each expert of each MoE layer in the latest step. */
export function stepTokensOf(model: HybridModel, stages: Group): ReadonlyMap<number, number[]> {
	const own = new Map([...model.routers].map(([layer, { stepTokens }]) => [layer, [...stepTokens.toInt32()]]));
	return overStages(model, stages, own, (layer) => configOfLayer(model.config, layer).moe.experts);
}

/** Mean of each loss over the layers. */
export function meanOfLayers(losses: LossesByLayer): Record<string, number> {
	const sums: Record<string, number> = {};
	for (const own of losses.values()) {
		for (const [name, value] of Object.entries(own)) sums[name] = (sums[name] ?? 0) + value / losses.size;
	}
	return sums;
}
