/** The axes along which an elastic model has sizes to choose from (docs/spec/elastic.md §2). */
import type { LayerKind } from "../../config/hybrid-pattern.ts";
import type { HybridConfig } from "../../models/language/config.ts";
import { UserError } from "../../system/errors.ts";

/** In the order in which the router's networks are evaluated. */
export const axisNames = ["mlp", "mamba", "moe_expert", "head", "skip_layer", "emb"] as const;
export type AxisName = (typeof axisNames)[number];

/** One axis: sizes in descending order, the parent's first. */
export interface Axis {
	readonly name: AxisName;
	/** For skip_layer: number of ranked layers that are skipped, ascending from 0. */
	readonly sizes: readonly number[];
	/** Layers of the main part, each with a choice of its own; null: one choice for all. */
	readonly layers: readonly number[] | null;
}

/** Number of choices that an axis makes: one, or one for each of its layers. */
export function rowsOf({ layers }: Axis): number {
	return layers?.length ?? 1;
}

/** Kind of the layers that an axis cuts; null: all of them. */
export const layerKind: Readonly<Record<AxisName, LayerKind | null>> = {
	mlp: "moe",
	mamba: "mamba",
	moe_expert: "moe",
	head: "attention",
	skip_layer: null,
	emb: null,
};

/** Prefix of an axis's flags. */
export const flagPrefix: Readonly<Record<Exclude<AxisName, "skip_layer">, string>> = {
	mlp: "mlp",
	mamba: "mamba",
	moe_expert: "moe-expert",
	head: "head",
	emb: "emb",
};

/** The parent's size of an axis. */
export function parentSize({ hiddenSize, mamba, moe, attention }: HybridConfig, axis: AxisName): number {
	switch (axis) {
		case "emb":
			return hiddenSize;
		case "mamba":
			return mamba.heads;
		case "mlp":
			return moe.ffnHiddenSize;
		case "moe_expert":
			return moe.experts;
		case "head":
			return attention.heads;
		case "skip_layer":
			return 0;
	}
}

/** The sizes of an axis from its two lists, at most one of them given; null: the parent's size alone. */
export function sizesOf(
	axis: keyof typeof flagPrefix,
	parent: number,
	{ ratios, sizes }: { readonly ratios: readonly number[] | null; readonly sizes: readonly number[] | null },
): readonly number[] {
	const flag = flagPrefix[axis];
	if (ratios !== null && sizes !== null)
		throw new UserError(`${flag}-per-list and ${flag}-int-list are both given; allowed is one of them, not both.`);
	if (ratios === null) return sizes ?? [parent];
	const wrong = ratios.find((ratio) => !(ratio >= 0 && ratio <= 1));
	if (wrong !== undefined) throw new UserError(`${flag}-per-list has ${wrong}; allowed are ratios from 0 to 1.`);
	return ratios.map((ratio) => Math.floor(ratio * parent));
}

/**
 * Why the sizes of an axis cannot be trained, as the end of a sentence that begins with them; null: they can. `expertTensor`:
 * ranks that cut an expert's channels.
 */
export function sizesProblem(
	axis: keyof typeof flagPrefix,
	sizes: readonly number[],
	model: HybridConfig,
	{ expertTensor = 1 }: { readonly expertTensor?: number } = {},
): string | null {
	const parent = parentSize(model, axis);
	const [first] = sizes;
	if (first !== parent) return `begins with ${first}; allowed is the parent's ${parent} first`;
	const at = sizes.findIndex((size, index) => index > 0 && size >= sizes[index - 1]!);
	if (at > 0) return `has ${sizes[at]} after ${sizes[at - 1]}; allowed are falling sizes`;
	const each = (holds: (size: number) => boolean, allowed: string) => {
		const wrong = sizes.find((size) => !holds(size));
		return wrong === undefined ? null : `has ${wrong}; allowed are ${allowed}`;
	};
	switch (axis) {
		case "emb":
			return each((size) => size >= 1, "sizes of at least 1");
		case "mlp":
			return each(
				(size) => size >= 1 && size % expertTensor === 0,
				expertTensor === 1 ? "sizes of at least 1" : `multiples of the expert tensor parallelism (${expertTensor})`,
			);
		case "moe_expert":
			if (model.moe.groups > 1 && sizes.length > 1) {
				return `has ${sizes[1]}; allowed are all ${first} experts where they lie in ${model.moe.groups} groups (moe-router-num-groups)`;
			}
			return each((size) => size >= model.moe.topk, `at least moe-router-topk (${model.moe.topk})`);
		case "mamba":
			return each(
				(size) => size >= 1 && size % model.mamba.groups === 0,
				`multiples of mamba-num-groups (${model.mamba.groups})`,
			);
		case "head":
			return each(
				(size) => size >= 1 && size % model.attention.queryGroups === 0,
				`multiples of num-query-groups (${model.attention.queryGroups})`,
			);
	}
}

/** Why a ranking of layers cannot be used, as the end of a sentence; null: it can. */
export function rankingProblem(ranking: readonly number[], layers: number): string | null {
	const outside = ranking.find((layer) => layer >= layers);
	if (outside !== undefined) return `has ${outside}; allowed are layers 0 to ${layers - 1}`;
	const twice = ranking.find((layer, at) => ranking.indexOf(layer) !== at);
	if (twice !== undefined) return `has ${twice} twice`;
	return ranking.length < layers ? null : "has every layer; allowed is a ranking that leaves one out";
}
