/**
 * The values of masks as functions of a sample's probabilities (docs/spec/elastic.md §9). Columns take their factors from them
 * (rings.ts). Every value is linear in the probabilities of one choice, or the square of such a value: Σ_k c_k p_k with soft
 * masks, c of the chosen size times its probability without.
 */

import type { HybridConfig } from "../../../models/language/config.ts";
import { type Axis, type AxisName, parentSize, rowsOf } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";
import type { AxisSample, RouterSample } from "../router/network.ts";

/** Purpose of a table's factors. */
export type TablePurpose =
	/** A factor for every ring: 1 where the choice keeps it. */
	| "prefix"
	/** The square of a prefix's factor: of a weight whose input has the same mask. */
	| "square"
	/** A prefix of experts' scores, in Megatron never 0: an expert of score 0 may be chosen, and its factor has a gradient. */
	| "scores"
	/** √(size / parent's size), behind a norm. */
	| "norm"
	/** 1 whatever the choice. */
	| "one"
	/** 1 where the choice leaves the layer in: `row` is the layer's place in the ranking. */
	| "keep";

export interface Table {
	readonly axis: AxisName;
	/** Of an axis's choices. */
	readonly row: number;
	readonly purpose: TablePurpose;
	/** First of its factors among all. */
	readonly offset: number;
	/** Of every factor: a number for each choice. */
	readonly coefficients: readonly (readonly number[])[];
}

/** Next to nothing beside a score, and enough for a gradient. */
const leastFactor = 1e-28;

/** All tables of a model, one after the other. */
export class TableLayout {
	readonly tables: readonly Table[];
	/** Factors of all tables. */
	readonly size: number;
	readonly #byName: ReadonlyMap<string, Table>;
	/** Whether routing weights stay the same when all experts' factors grow alike. */
	readonly #expertsAreRelative: boolean;

	constructor(
		readonly config: ElasticConfig,
		model: HybridConfig,
	) {
		const tables: Table[] = [];
		let offset = 0;
		const add = (axis: Axis, row: number, purpose: TablePurpose, coefficients: number[][]) => {
			tables.push({ axis: axis.name, row, purpose, offset, coefficients });
			offset += coefficients.length;
		};
		for (const axis of config.axes) {
			const { sizes, name } = axis;
			if (name === "skip_layer") {
				for (const place of config.ranking.keys())
					add(axis, place, "keep", [sizes.map((left) => (left <= place ? 1 : 0))]);
				continue;
			}
			const parent = parentSize(model, name);
			for (let row = 0; row < rowsOf(axis); row++) {
				const prefix = sizes.map((_, ring) => sizes.map((_, choice) => (choice <= ring ? 1 : 0)));
				add(axis, row, "prefix", prefix);
				if (name === "mamba") add(axis, row, "square", prefix);
				if (name === "emb" || name === "mamba") add(axis, row, "norm", [sizes.map((size) => Math.sqrt(size / parent))]);
				if (name === "moe_expert") add(axis, row, "scores", prefix);
				if (name === "emb" || name === "moe_expert") add(axis, row, "one", [sizes.map(() => 1)]);
			}
		}
		this.#expertsAreRelative = config.softMask && model.moe.topk > 1;
		this.tables = tables;
		this.size = offset;
		this.#byName = new Map(tables.map((table) => [`${table.axis} ${table.row} ${table.purpose}`, table]));
	}

	get(axis: AxisName, row: number, purpose: TablePurpose): Table {
		return this.#byName.get(`${axis} ${row} ${purpose}`)!;
	}

	/** All factors of a sample. */
	values(sample: RouterSample, into: Float32Array): void {
		for (const table of this.tables) {
			const weights = this.#weights(sample.get(table.axis)!, table);
			const least = table.purpose === "scores" && this.config.softMask && this.config.compat ? leastFactor : 0;
			for (const [at, coefficients] of table.coefficients.entries()) {
				const value = linear(coefficients, weights);
				into[table.offset + at] = Math.max(least, table.purpose === "square" ? value ** 2 : value);
			}
		}
	}

	/** Adds the gradients of a sample's factors to those of its probabilities, by axis. */
	addGradients(
		sample: RouterSample,
		values: Float32Array,
		dvalues: Float32Array,
		gradient: ReadonlyMap<AxisName, Float64Array>,
	): void {
		for (const table of this.tables) {
			const end = table.offset + table.coefficients.length;
			const own = Float64Array.from(dvalues.subarray(table.offset, end));
			if (table.purpose === "scores" && this.#expertsAreRelative) acrossOnly(own, values.subarray(table.offset, end));
			const one = sample.get(table.axis)!;
			const row = rowOf(table);
			const to = gradient.get(table.axis)!;
			const choices = one.axis.sizes.length;
			const weights = this.#weights(one, table);
			for (const [at, coefficients] of table.coefficients.entries()) {
				const d = own[at]! * (table.purpose === "square" ? 2 * linear(coefficients, weights) : 1);
				if (d === 0) continue;
				for (let k = 0; k < choices; k++) {
					if (!this.config.softMask && k !== one.chosen[row]) continue;
					to[row * choices + k]! += d * coefficients[k]!;
				}
			}
		}
	}

	/** Σ_k p_k size_k / parent's size of a row, or that of its chosen size: the factor of a norm's ε. */
	epsilonFactor(sample: RouterSample, axis: AxisName, row: number, parent: number): number {
		const one = sample.get(axis)!;
		const { sizes } = one.axis;
		if (!this.config.softMask) return sizes[one.chosen[row]!]! / parent;
		return sizes.reduce((sum, size, k) => sum + one.probabilities[row * sizes.length + k]! * size, 0) / parent;
	}

	/** M_e / Σ M of every expert of a layer with the axis's choices `row` (docs/spec/elastic.md §10). */
	expertShares(sample: RouterSample, row: number): Float64Array {
		const { sizes } = sample.get("moe_expert")!.axis;
		const table = this.get("moe_expert", row, "prefix");
		const weights = this.#weights(sample.get("moe_expert")!, table);
		const factors = table.coefficients.map((coefficients) => linear(coefficients, weights));
		const ofExperts = Float64Array.from(
			{ length: sizes[0]! },
			(_, e) => factors[sizes.findLastIndex((size) => e < size)]!,
		);
		const sum = ofExperts.reduce((total, factor) => total + factor, 0);
		return ofExperts.map((factor) => factor / sum);
	}

	/** How much each choice counts. */
	#weights(sample: AxisSample, table: Table): number[] {
		const row = rowOf(table);
		const choices = sample.axis.sizes.length;
		return Array.from({ length: choices }, (_, k) =>
			this.config.softMask || k === sample.chosen[row] ? sample.probabilities[row * choices + k]! : 0,
		);
	}
}

/**
 * Leaves of a gradient what is across the factors: along them it is 0, and what rounding left there would be all the gradient
 * of a choice that has every chosen expert.
 */
function acrossOnly(gradient: Float64Array, values: Float32Array): void {
	const dot = gradient.reduce((sum, d, at) => sum + d * values[at]!, 0);
	const squares = values.reduce((sum, value) => sum + value * value, 0);
	for (const [at, value] of values.entries()) gradient[at]! -= (dot * value) / squares;
}

function linear(coefficients: readonly number[], weights: readonly number[]): number {
	return coefficients.reduce((sum, c, k) => sum + c * weights[k]!, 0);
}

/** Row of the axis's choices that a table reads: places of a ranking share one. */
function rowOf({ axis, row }: Table): number {
	return axis === "skip_layer" ? 0 : row;
}
