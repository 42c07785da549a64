/**
 * Rings of columns: the columns that the same choices of an axis keep, in the order of this rank's part of a layer
 * (docs/spec/elastic.md §9). Ring r is kept by choices 0 to r.
 */

import type { HybridModel } from "../../models/hybrid/model.ts";
import { placeOf } from "../../parallel/model-parallel.ts";
import { isGatedActivation } from "../../tensor/ops/activation.ts";
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

/** `compat`: Megatron keeps the first Mamba heads of a tensor-parallel rank, whatever their groups. */
function maskedParts(
	{ name, sizes }: Axis,
	{ config, parallel }: Pick<HybridModel, "config" | "parallel">,
	{ compat, softMask }: Pick<ElasticConfig, "compat" | "softMask">,
): MaskedPart[] {
	const { tensor, expertTensor } = placeOf(parallel);
	const part = (purpose: TablePurpose, name: PartName, rings: readonly number[]): MaskedPart => ({
		purpose,
		name,
		rings: Int32Array.from(rings),
	});
	// Columns that every choice keeps: their factor is the sum of all probabilities, or the chosen one's.
	const always = softMask ? -1 : sizes.length - 1;
	const ownWidth = config.moe.ffnHiddenSize / expertTensor.size;
	const halves = isGatedActivation(config.mlp.activation) ? 2 : 1;
	switch (name) {
		case "emb":
			return [
				part(
					"prefix",
					"hidden",
					Array.from({ length: config.hiddenSize }, (_, j) => ringOf(j, sizes)),
				),
				part("norm", "hidden", repeated(0, config.hiddenSize)),
				part("one", "channels", repeated(0, halves * ownWidth)),
			];
		case "moe_expert": {
			const { experts } = config.moe;
			const rings = Array.from({ length: experts }, (_, e) => ringOf(e, sizes));
			return [
				part("prefix", "experts", rings),
				part("scores", "experts", rings),
				part("one", "experts", repeated(0, experts)),
			];
		}
		case "mlp": {
			const half = Array.from({ length: ownWidth }, (_, j) => ringOf(expertTensor.rank * ownWidth + j, sizes));
			return [part("prefix", "channels", halves === 2 ? [...half, ...half] : half)];
		}
		case "mamba": {
			const { heads, groups, headDim, stateDim, convKernel } = config.mamba;
			const runs = compat ? tensor.size : groups;
			const limits = sizes.map((size) => size / runs);
			const own = Array.from({ length: heads / tensor.size }, (_, h) => ringOf(h % (heads / runs), limits));
			const channels = own.flatMap((ring) => repeated(ring, headDim));
			const convolution = [...channels, ...repeated(always, (2 * groups * stateDim) / tensor.size)];
			return [
				part("prefix", "gate", channels),
				part("prefix", "step", own),
				part("prefix", "bias", convolution),
				part(
					"square",
					"convolution",
					convolution.flatMap((ring) => repeated(ring, convKernel)),
				),
				part("norm", "inner", repeated(0, channels.length)),
			];
		}
		case "head": {
			const { heads, queryGroups, headDim } = config.attention;
			const limits = sizes.map((size) => size / queryGroups);
			const group = Array.from({ length: heads / queryGroups }, (_, h) => repeated(ringOf(h, limits), headDim)).flat();
			const keys = repeated(always, 2 * headDim);
			const groups = Array.from({ length: queryGroups / tensor.size });
			return [
				part(
					"prefix",
					"projection",
					groups.flatMap(() => [...group, ...keys]),
				),
				part(
					"prefix",
					"attended",
					groups.flatMap(() => group),
				),
			];
		}
		case "skip_layer":
			return [part("keep", "hidden", repeated(0, config.hiddenSize))];
	}
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
