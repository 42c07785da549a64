/**
 * Rings of columns: the columns that the same choices of an axis keep, in the order of this rank's part of a layer
 * (docs/spec/elastic.md §9). Ring r is kept by choices 0 to r.
 */

import type { HybridModel } from "../../../models/language/model.ts";
import { isGatedActivation } from "../../../native/activations.ts";
import { placeOf } from "../../../parallel/index.ts";
import type { Axis, AxisName } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import type { Table, TableLayout, TablePurpose } from "./tables.ts";

/** Ring of the unit at a place of its run; choices keep the first `limits[choice]` units, a descending list. */
function ringOf(place: number, limits: readonly number[]): number {
	return limits.findLastIndex((limit) => place < limit);
}

/** A part of the model that a table masks: the table's purpose, and a ring for every column, or -1: its factor is 1. */
export interface MaskedPart {
	readonly purpose: TablePurpose;
	readonly name: PartName;
	readonly rings: Int32Array;
}

export type PartName =
	/** Hidden columns. */
	| "hidden"
	/** Outputs of an expert's first projection. */
	| "channels"
	| "experts"
	/** Of a Mamba layer: z, dt, the convolution's weight by element, its bias, what the gated norm puts out. */
	| "gate"
	| "step"
	| "convolution"
	| "bias"
	| "inner"
	/** Of an attention layer: query, key and value heads' columns as they are projected; columns of what attention puts out. */
	| "projection"
	| "attended";

const repeated = (ring: number, times: number) => Array.from({ length: times }, () => ring);

function part(purpose: TablePurpose, name: PartName, rings: readonly number[]): MaskedPart {
	return { purpose, name, rings: Int32Array.from(rings) };
}

type MaskedModel = Pick<HybridModel, "config" | "parallel">;
type MaskOptions = Pick<ElasticConfig, "compat" | "softMask">;

/** The parts of this rank's model that the tables of an axis mask. */
function maskedParts({ name, sizes }: Axis, model: MaskedModel, options: MaskOptions): MaskedPart[] {
	const { hiddenSize } = model.config;
	switch (name) {
		case "emb":
			return hiddenParts(sizes, model);
		case "moe_expert":
			return expertParts(sizes, model);
		case "mlp":
			return [part("prefix", "channels", channelRings(sizes, model))];
		case "mamba":
			return mambaParts(sizes, model, options);
		case "head":
			return attentionParts(sizes, model, options);
		case "skip_layer":
			return [part("keep", "hidden", repeated(0, hiddenSize))];
	}
}

function hiddenParts(sizes: readonly number[], { config, parallel }: MaskedModel): MaskedPart[] {
	const rings = Array.from({ length: config.hiddenSize }, (_, j) => ringOf(j, sizes));
	return [
		part("prefix", "hidden", rings),
		part("norm", "hidden", repeated(0, config.hiddenSize)),
		part("one", "channels", repeated(0, halvesOf(config) * ownChannels({ config, parallel }))),
	];
}

function expertParts(sizes: readonly number[], { config: { moe } }: MaskedModel): MaskedPart[] {
	const rings = Array.from({ length: moe.experts }, (_, e) => ringOf(e, sizes));
	return [
		part("prefix", "experts", rings),
		part("scores", "experts", rings),
		part("one", "experts", repeated(0, moe.experts)),
	];
}

/** Rings of the outputs of an expert's first projection. */
function channelRings(sizes: readonly number[], { config, parallel }: MaskedModel): number[] {
	const own = ownChannels({ config, parallel });
	const first = placeOf(parallel).expertTensor.rank * own;
	const half = Array.from({ length: own }, (_, j) => ringOf(first + j, sizes));
	return Array.from({ length: halvesOf(config) }, () => half).flat();
}

/** An expert's channels on this rank, gate and value counted once. */
function ownChannels({ config, parallel }: MaskedModel): number {
	return config.moe.ffnHiddenSize / placeOf(parallel).expertTensor.size;
}

function halvesOf({ mlp }: HybridModel["config"]): number {
	return isGatedActivation(mlp.activation) ? 2 : 1;
}

/** Ring of columns that every choice keeps: their factor is the sum of all probabilities, or the chosen one's. */
function alwaysKept(sizes: readonly number[], { softMask }: MaskOptions): number {
	return softMask ? -1 : sizes.length - 1;
}

function mambaParts(sizes: readonly number[], { config, parallel }: MaskedModel, options: MaskOptions): MaskedPart[] {
	const { heads, groups, headDim, stateDim, convKernel } = config.mamba;
	const { tensor } = placeOf(parallel);
	// Megatron keeps the first heads of a tensor-parallel rank, whatever their groups.
	const runs = options.compat ? tensor.size : groups;
	const limits = sizes.map((size) => size / runs);
	const own = Array.from({ length: heads / tensor.size }, (_, h) => ringOf(h % (heads / runs), limits));
	const channels = own.flatMap((ring) => repeated(ring, headDim));
	const bAndC = repeated(alwaysKept(sizes, options), (2 * groups * stateDim) / tensor.size);
	const convolution = [...channels, ...bAndC];
	const weight = convolution.flatMap((ring) => repeated(ring, convKernel));
	return [
		part("prefix", "gate", channels),
		part("prefix", "step", own),
		part("prefix", "bias", convolution),
		part("square", "convolution", weight),
		part("norm", "inner", repeated(0, channels.length)),
	];
}

function attentionParts(
	sizes: readonly number[],
	{ config, parallel }: MaskedModel,
	options: MaskOptions,
): MaskedPart[] {
	const { heads, queryGroups, headDim } = config.attention;
	const limits = sizes.map((size) => size / queryGroups);
	const queries = Array.from({ length: heads / queryGroups }, (_, h) => repeated(ringOf(h, limits), headDim)).flat();
	const keyAndValue = repeated(alwaysKept(sizes, options), 2 * headDim);
	const ownGroups = Array.from({ length: queryGroups / placeOf(parallel).tensor.size });
	const projection = ownGroups.flatMap(() => [...queries, ...keyAndValue]);
	const attended = ownGroups.flatMap(() => queries);
	return [part("prefix", "projection", projection), part("prefix", "attended", attended)];
}

/** The factors that a table's part has among all. */
export interface PartPlace {
	readonly table: Table;
	readonly offset: number;
	readonly width: number;
}

/** Kernels read four factors at once. */
const alignment = 4;

/** The factors of all tables' parts, one after the other, and the tables' values that they are. */
export class FactorLayout {
	readonly sources: Int32Array;
	readonly #places = new Map<string, PartPlace>();

	constructor(
		axes: readonly Axis[],
		{ tables }: TableLayout,
		model: Pick<HybridModel, "config" | "parallel">,
		options: Pick<ElasticConfig, "compat" | "softMask">,
	) {
		const sources: number[] = [];
		const parts = new Map(axes.map((axis) => [axis.name, maskedParts(axis, model, options)]));
		for (const table of tables) {
			for (const { purpose, name, rings } of parts.get(table.axis)!) {
				if (purpose !== table.purpose) continue;
				const place = { table, offset: sources.length, width: rings.length };
				this.#places.set(keyOf(table.axis, table.row, purpose, name), place);
				for (const ring of rings) sources.push(ring < 0 ? -1 : table.offset + ring);
				while (sources.length % alignment !== 0) sources.push(-1);
			}
		}
		this.sources = Int32Array.from(sources);
	}

	get(axis: AxisName, row: number, purpose: TablePurpose, name: PartName): PartPlace {
		return this.#places.get(keyOf(axis, row, purpose, name))!;
	}
}

function keyOf(...parts: (string | number)[]): string {
	return parts.join(" ");
}
