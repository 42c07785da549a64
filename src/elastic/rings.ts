/**
 * Rings of columns: the columns that the same choices of an axis keep, in the order of this rank's part of a layer
 * (docs/spec/elastic.md §9). Ring r is kept by choices 0 to r.
 */

import { isGated } from "../models/hybrid/config.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { placeOf } from "../parallel/model-parallel.ts";
import { Tensor } from "../tensor/tensor.ts";
import type { Axis, AxisName } from "./axes.ts";
import type { ElasticConfig } from "./config.ts";

/** Ring of the unit at a place of its run, of which a choice keeps the first so many: `limits`, descending. */
export function ringOf(place: number, limits: readonly number[]): number {
	return limits.findLastIndex((limit) => place < limit);
}

/** Rings of the parts of the model that an axis masks; i32, by columns. */
export interface AxisRings {
	/** Hidden columns, expert channels, experts, or query heads' columns of the fused projection. */
	readonly columns: Int32Array;
	/** Of heads: columns of what attention puts out. Of Mamba heads: the convolution's bias. */
	readonly second: Int32Array | null;
	/** The convolution's weight, by element. */
	readonly third: Int32Array | null;
}

const repeated = (ring: number, times: number) => Array.from({ length: times }, () => ring);

/** `compat`: Megatron keeps the first Mamba heads of a tensor-parallel rank, whatever their groups. */
export function ringsOf(
	{ name, sizes }: Axis,
	{ config, parallel }: Pick<HybridModel, "config" | "parallel">,
	{ compat, softMask }: Pick<ElasticConfig, "compat" | "softMask">,
): AxisRings | null {
	const { tensor, expertTensor } = placeOf(parallel);
	// Columns that every choice keeps: their factor is the sum of all probabilities, or the chosen one's.
	const always = softMask ? -1 : sizes.length - 1;
	switch (name) {
		case "emb":
			return only(Array.from({ length: config.hiddenSize }, (_, j) => ringOf(j, sizes)));
		case "moe_expert":
			return only(Array.from({ length: config.moe.experts }, (_, e) => ringOf(e, sizes)));
		case "mlp": {
			const width = config.moe.ffnHiddenSize / expertTensor.size;
			const half = Array.from({ length: width }, (_, j) => ringOf(expertTensor.rank * width + j, sizes));
			return only(isGated(config.mlp.activation) ? [...half, ...half] : half);
		}
		case "mamba": {
			const { heads, groups, headDim, stateDim, convKernel } = config.mamba;
			const runs = compat ? tensor.size : groups;
			const limits = sizes.map((size) => size / runs);
			const own = Array.from({ length: heads / tensor.size }, (_, h) => ringOf(h % (heads / runs), limits));
			const channels = own.flatMap((ring) => repeated(ring, headDim));
			const states = repeated(always, (2 * groups * stateDim) / tensor.size);
			const convolution = [...channels, ...states];
			return {
				columns: Int32Array.from([...channels, ...convolution, ...own]),
				second: Int32Array.from(convolution),
				third: Int32Array.from(convolution.flatMap((ring) => repeated(ring, convKernel))),
			};
		}
		case "head": {
			const { heads, queryGroups, headDim } = config.attention;
			const limits = sizes.map((size) => size / queryGroups);
			const group = Array.from({ length: heads / queryGroups }, (_, h) => repeated(ringOf(h, limits), headDim)).flat();
			const keys = repeated(always, 2 * headDim);
			const groups = Array.from({ length: queryGroups / tensor.size });
			return {
				columns: Int32Array.from(groups.flatMap(() => [...group, ...keys])),
				second: Int32Array.from(groups.flatMap(() => group)),
				third: null,
			};
		}
		case "skip_layer":
			return null;
	}
}

function only(columns: number[]): AxisRings {
	return { columns: Int32Array.from(columns), second: null, third: null };
}

/** The rings of every axis on the device. */
export class DeviceRings implements Disposable {
	readonly #byAxis = new Map<
		AxisName,
		{ readonly columns: Tensor; readonly second: Tensor | null; readonly third: Tensor | null }
	>();

	constructor(axes: readonly Axis[], model: HybridModel, options: Pick<ElasticConfig, "compat" | "softMask">) {
		const put = (values: Int32Array | null) =>
			values && Tensor.from(model.device, values, [values.length], { tag: "parameter" });
		for (const axis of axes) {
			const rings = ringsOf(axis, model, options);
			if (rings === null) continue;
			const { columns, second, third } = rings;
			this.#byAxis.set(axis.name, { columns: put(columns)!, second: put(second), third: put(third) });
		}
	}

	get(axis: AxisName): { readonly columns: Tensor; readonly second: Tensor | null; readonly third: Tensor | null } {
		return this.#byAxis.get(axis)!;
	}

	[Symbol.dispose](): void {
		for (const { columns, second, third } of this.#byAxis.values())
			for (const tensor of [columns, second, third]) tensor?.[Symbol.dispose]();
	}
}
