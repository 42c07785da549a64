/**
 * Columns times factors that rings of columns share: the masks of elastic models (docs/spec/elastic.md §9). A factor's
 * gradient adds to a place of its own, which many uses of the factor share.
 */
import type { GradientSlot } from "../gradient.ts";
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type FloatDtype, Tensor } from "../tensor.ts";

/** A factor for every ring, and the ring of every column. Nothing here is owned. */
export interface ColumnMask {
	/** i32 [W], -1 where the factor is 1; null: every column is in ring 0. */
	readonly rings: Tensor | null;
	/** f32 [rings]. */
	readonly values: Tensor;
	/** f32 [rings], added to; null: not wanted. */
	readonly gradients: Tensor | null;
}

/** y_RW = m_W x_RW, x f32 or bf16. Only the live rows are computed. */
export function maskColumns(tape: Tape, x: Tensor, mask: ColumnMask): Tensor {
	requireRings(mask, x.width);
	const { device } = tape;
	const common = { rings: mask.rings, values: mask.values, row_count: x.rowCount, rows: x.rows, width: x.width };
	using all = tape.output(
		Tensor.empty(device, x.shape, x.dtype as FloatDtype),
		x.gradient !== null || mask.gradients !== null,
	);
	const y = all.withRowCount(x.rowCount);
	const dtype = x.dtypeCode;
	device.run("mask_columns_forward", { ...common, x, y, x_stride: x.stride, y_stride: y.stride, dtype });
	tape.record({
		name: "mask_columns",
		outputs: [y],
		keep: [mask.gradients === null ? null : x, mask.rings, mask.values, mask.gradients, x.rowCount],
		backward: ([dy]) => {
			const dx = x.gradient?.target() ?? null;
			device.run("mask_columns_backward", {
				...common,
				dy: dy!,
				x,
				dx,
				dvalues: mask.gradients,
				ring_count: mask.values.elements,
				dy_stride: dy!.stride,
				x_stride: x.stride,
				dx_stride: dx?.stride ?? x.width,
				accumulate: 0,
				x_dtype: dtype,
				gradient_dtype: dy!.dtypeCode,
			});
			if (dx) x.gradient!.accumulate(dx);
		},
	});
	return y;
}

/**
 * A parameter's masked values, for an operation that reads it as they are. `mask`: a ring for every element. The receiver
 * disposes it.
 */
export class MaskedValues implements Disposable {
	readonly values: Tensor;

	constructor(
		readonly parameter: Parameter,
		readonly mask: ColumnMask,
	) {
		const { value } = parameter;
		requireRings(mask, value.elements);
		this.values = Tensor.empty(value.device, value.shape, value.dtype as FloatDtype);
		using x = value.view([1, value.elements]);
		using y = this.values.view([1, value.elements]);
		value.device.run("mask_columns_forward", {
			...this.#common,
			x,
			y,
			x_stride: x.stride,
			y_stride: y.stride,
			dtype: value.dtypeCode,
		});
	}

	/** From the gradient of the masked values, fp32, to those of the parameter and of the mask. */
	addGradients(dvalues: Tensor): void {
		const { value, mainGradient } = this.parameter;
		const { elements, device } = value;
		using x = value.view([1, elements]);
		using dy = dvalues.view([1, elements]);
		using dx = mainGradient?.view([1, elements]) ?? null;
		device.run("mask_columns_backward", {
			...this.#common,
			dy,
			x,
			dx,
			dvalues: this.mask.gradients,
			ring_count: this.mask.values.elements,
			dy_stride: elements,
			x_stride: elements,
			dx_stride: elements,
			accumulate: 1,
			x_dtype: value.dtypeCode,
			gradient_dtype: dy.dtypeCode,
		});
	}

	get #common() {
		const { rings, values } = this.mask;
		return { rings, values, row_count: null, rows: 1, width: this.parameter.value.elements };
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
	}
}

/** Whether an operation that reads x, or parameters, behind a mask has gradients to compute. */
export function wantsGradient(gradient: GradientSlot | null, mask: ColumnMask | null): boolean {
	return gradient !== null || (mask?.gradients ?? null) !== null;
}

function requireRings({ rings }: ColumnMask, columns: number): void {
	if (rings === null || rings.elements === columns) return;
	throw new RangeError(`A mask of ${rings.elements} columns cannot stand before ${columns}.`);
}

/** The bias of masked experts, and their logits: docs/spec/elastic.md §10. */
export interface ScoreMask extends ColumnMask {
	/** Sigmoid scores are multiplied by the factor; if not, logits are. */
	readonly sigmoid: boolean;
	/** Bias of an expert whose factor is 0. */
	readonly blockedBias: number;
	/** What masks the bias, where that is not what masks the logits. */
	readonly ofBias: ColumnMask | null;
}

/**
 * logits_TE (f32, contiguous) whose scores are masked, and the bias that goes with them; null without a bias. Experts of
 * factor 0 are never chosen.
 */
export function maskScores(
	tape: Tape,
	logits: Tensor,
	mask: ScoreMask,
	bias: Tensor | null,
): { readonly logits: Tensor; readonly bias: Tensor | null } {
	requireRings(mask, logits.width);
	const { device } = tape;
	const common = { logits, rings: mask.rings, values: mask.values, tokens: logits.rows, experts: logits.width };
	const y = tape.output(Tensor.empty(device, logits.shape), wantsGradient(logits.gradient, mask));
	const maskedBias = bias && Tensor.empty(device, bias.shape);
	const sigmoid = Number(mask.sigmoid);
	const blocked = { masked_bias: maskedBias, blocked_bias: mask.blockedBias };
	device.run("mask_scores_forward", { ...common, expert_bias: bias, y, ...blocked, sigmoid });
	if (mask.ofBias !== null) {
		const { rings, values } = mask.ofBias;
		device.run("mask_scores_forward", {
			...common,
			rings,
			values,
			tokens: 0,
			expert_bias: bias,
			y,
			...blocked,
			sigmoid,
		});
	}
	tape.record({
		name: "mask_scores",
		outputs: [y],
		keep: [logits, mask.rings, mask.values, mask.gradients],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const dlogits = logits.gradient?.contiguousTarget() ?? null;
			device.run("mask_scores_backward", {
				...common,
				dy,
				dlogits,
				dvalues: mask.gradients,
				ring_count: mask.values.elements,
				sigmoid,
			});
			if (dlogits) logits.gradient!.accumulate(dlogits);
		},
	});
	return { logits: y, bias: maskedBias };
}
