/** Factors of columns: the masks of elastic models (docs/spec/elastic.md §9), which operations take beside their operands. */
import type { GradientSlot } from "./gradient.ts";
import type { Tensor } from "./tensor.ts";

/** A factor for every column. Nothing here is owned. */
export interface ColumnMask {
	/** f32 [W]. */
	readonly factors: Tensor;
	/** f32 [W], added to; null: not wanted. */
	readonly gradients: Tensor | null;
}

/** One factor for all columns. */
export interface ScaleMask {
	/** f32 [1]. */
	readonly value: Tensor;
	/** f32 [W]: every column's part of the value's gradient, added to; null: not wanted. */
	readonly gradients: Tensor | null;
}

/** The factors of a tensor's columns: scale · columns. */
export interface Mask {
	readonly columns: ColumnMask | null;
	readonly scale: ScaleMask | null;
}

/** Both parts as a kernel reads them; a RangeError where they are not of `width` columns. */
export function maskArguments({ columns, scale }: Mask, width: number) {
	for (const tensor of [columns?.factors, columns?.gradients, scale?.gradients]) {
		if (!tensor || tensor.elements === width) continue;
		throw new RangeError(`A mask of ${tensor.elements} columns cannot stand before ${width}.`);
	}
	return { factors: columns?.factors ?? null, scale: scale?.value ?? null };
}

/** Memory to which a kernel adds the gradients of both parts. */
export function maskGradients({ columns, scale }: Mask) {
	return { dfactors: columns?.gradients ?? null, dscale: scale?.gradients ?? null };
}

/** The tensors of a mask that backward reads, for Operation.keep; null where the mask lacks them. */
export function maskTensors({ columns, scale }: Mask): (Tensor | null)[] {
	return [columns?.factors, columns?.gradients, scale?.value, scale?.gradients].map((tensor) => tensor ?? null);
}

/** Whether an operation that reads x, or parameters, behind a mask has gradients to compute. */
export function wantsGradient(gradient: GradientSlot | null, mask: Mask | null): boolean {
	return gradient !== null || (mask !== null && Object.values(maskGradients(mask)).some((wanted) => wanted !== null));
}
