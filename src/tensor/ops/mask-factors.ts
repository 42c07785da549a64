/**
 * Expands a few mask values to factors of columns (docs/spec/elastic.md §9), for all masks of several microbatches in one
 * operation.
 */
import type { Device } from "../../native/device.ts";
import { Tensor } from "../tensor.ts";

/** The value that each factor takes. */
export class FactorSources implements Disposable {
	readonly #sources: Tensor;
	/** Factors by value, and where each value's begin. */
	readonly #members: Tensor;
	readonly #starts: Tensor;

	/** `sources`: a value below `values` for every factor, or -1: the factor is 1. */
	constructor(
		private readonly device: Device,
		sources: Int32Array,
		readonly values: number,
	) {
		const starts = new Int32Array(values + 1);
		for (const source of sources) if (source >= 0) starts[source + 1]!++;
		for (let value = 0; value < values; value++) starts[value + 1]! += starts[value]!;
		const next = starts.slice();
		const members = new Int32Array(starts[values]!);
		for (const [factor, source] of sources.entries()) if (source >= 0) members[next[source]!++] = factor;
		const put = (list: Int32Array) => Tensor.from(device, list, [list.length], { tag: "parameter" });
		this.#sources = put(sources);
		this.#members = put(members);
		this.#starts = put(starts);
	}

	/** Factors of a batch. */
	get factors(): number {
		return this.#sources.elements;
	}

	/** factors_BF from values_BV. */
	spread(values: Tensor): Tensor {
		const factors = Tensor.empty(this.device, [values.rows, this.factors]);
		this.device.run("mask_factors_forward", { ...this.#sizes(values), values, sources: this.#sources, factors });
		return factors;
	}

	/** dvalues_BV of dfactors_BF. */
	gather(dfactors: Tensor): Tensor {
		const dvalues = Tensor.zeros(this.device, [dfactors.rows, this.values]);
		const lists = { members: this.#members, starts: this.#starts };
		this.device.run("mask_factors_backward", { ...this.#sizes(dfactors), dfactors, ...lists, dvalues });
		return dvalues;
	}

	#sizes({ rows }: Tensor) {
		return { batch: rows, value_count: this.values, factor_count: this.factors };
	}

	[Symbol.dispose](): void {
		for (const owned of [this.#sources, this.#members, this.#starts]) owned[Symbol.dispose]();
	}
}
