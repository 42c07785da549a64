/** Masks whose factors are the values of rings, and whose gradients go back to these values. */
import type { ColumnMask, ScaleMask } from "../../src/tensor/column-mask.ts";
import { FactorSources } from "../../src/tensor/ops/mask-factors.ts";
import type { Tape } from "../../src/tensor/tape.ts";
import { Tensor } from "../../src/tensor/tensor.ts";

function spread(tape: Tape, values: Tensor, rings: readonly number[]) {
	const sources = new FactorSources(tape.device, Int32Array.from(rings), values.elements);
	using batch = values.view([1, values.elements]);
	const factors = sources.spread(batch);
	const gradients = Tensor.zeros(tape.device, factors.shape);
	const gather = () => {
		using gradient = sources.gather(gradients);
		values.gradient!.accumulate(gradient.view(values.shape));
	};
	// The gathering is recorded first, so it goes back last, after all columns have added to the gradients.
	tape.onReturn("mask factors", gather, [sources, factors, gradients]);
	return { factors, gradients };
}

/** Column c has the value of ring rings[c], 1 for ring -1. `values` has a gradient. */
export function ringMask(tape: Tape, values: Tensor, rings: readonly number[]): ColumnMask {
	return spread(tape, values, rings);
}

/** All `columns` have the one value. */
export function scaleMask(tape: Tape, value: Tensor, columns: number): ScaleMask {
	const rings = Array.from({ length: columns }, () => 0);
	return { value, gradients: spread(tape, value, rings).gradients };
}

/** The factor of a column in float64. */
export function factorOf(rings: ArrayLike<number>, values: ArrayLike<number>, column: number): number {
	const ring = rings[column]!;
	return ring < 0 ? 1 : values[ring]!;
}
