/**
 * Columns times factors: masks of elastic models (docs/spec/elastic.md §9) where no other operation takes them, of parameters,
 * and of router logits (§10). A factor's gradient adds to a place of its own, which many uses of the factor share.
 */
import {
	type ColumnMask,
	type Mask,
	maskArguments,
	maskGradients,
	maskTensors,
	wantsGradient,
} from "../column-mask.ts";
import type { Parameter } from "../parameter.ts";
import { ResidualSum } from "../residual-sum.ts";
import type { Tape } from "../tape.ts";
import { cast, contiguous, type FloatDtype, Tensor } from "../tensor.ts";

/** y_RW = mask_W x_RW, x f32 or bf16. Only the live rows are computed. */
export function maskColumns(tape: Tape, x: Tensor, mask: Mask): Tensor {
	return addMaskedColumns(tape, null, x, mask);
}

/** y_RW = a_RW + mask_W x_RW: the residual connection of a masked branch. One rounding; a's gradient is y's own, shared. */
export function addMaskedColumns(tape: Tape, a: Tensor | null, x: Tensor, mask: Mask): Tensor {
	const y = recordMaskedSum(tape, a, x, mask);
	writeMaskedSum(y, a, x, mask);
	return y;
}

/** y_RW = a_RW + scale_W x_RW: the residual connection of a branch with layer scale, a trained factor for every column. */
export function addScaledColumns(tape: Tape, a: Tensor, x: Tensor, scale: Parameter): Tensor {
	using factors = scale.value.dtype === "f32" ? scale.value.share() : cast(scale.value, "f32");
	const mask = { columns: { factors, gradients: scale.mainGradient }, scale: null };
	const y = recordMaskedSum(tape, a, x, mask, [scale]);
	writeMaskedSum(y, a, x, mask);
	return y;
}

/** a + x masked by `mask`, which the norm that reads it may write. */
export function addMaskedColumnsLater(tape: Tape, a: Tensor, x: Tensor, mask: Mask): ResidualSum {
	const sum = ResidualSum.later(recordMaskedSum(tape, a, x, mask), { residual: a, branch: x, mask }, (y, addends) =>
		writeMaskedSum(y, addends.residual, addends.branch, mask),
	);
	if (x.rowCount !== null || !a.contiguous || !x.contiguous) sum.written();
	return sum;
}

function writeMaskedSum(y: Tensor, a: Tensor | null, x: Tensor, mask: Mask): void {
	const { rowCount, rows, width } = x;
	const strides = { x_stride: x.stride, addend_stride: a?.stride ?? width, y_stride: y.stride };
	const sizes = { row_count: rowCount, rows, width, dtype: x.dtypeCode };
	x.device.run("mask_columns_forward", { ...maskArguments(mask, width), ...sizes, ...strides, x, addend: a, y });
}

/** The sum's place on the tape; its values are still to be written. `parameters`: those whose gradients the mask's are. */
function recordMaskedSum(
	tape: Tape,
	a: Tensor | null,
	x: Tensor,
	mask: Mask,
	parameters: readonly Parameter[] = [],
): Tensor {
	if (a !== null && (a.elements !== x.elements || a.width !== x.width || a.dtype !== x.dtype)) {
		throw new RangeError(`A masked ${x.dtype} [${x.shape}] cannot be added to ${a.dtype} [${a.shape}].`);
	}
	const { device } = tape;
	const common = { ...maskArguments(mask, x.width), row_count: x.rowCount, rows: x.rows, width: x.width };
	using all = tape.output(
		Tensor.empty(device, x.shape, x.dtype as FloatDtype),
		wantsGradient(x.gradient, mask) || (a?.gradient ?? null) !== null,
	);
	const y = all.withRowCount(x.rowCount);
	const dtype = x.dtypeCode;
	const gradients = maskGradients(mask);
	const sums = gradients.dfactors !== null || gradients.dscale !== null;
	tape.record({
		name: "mask_columns",
		outputs: [y],
		keep: [sums ? x : null, ...maskTensors(mask), x.rowCount],
		parameters,
		backward: ([dy]) => {
			a?.gradient?.accumulate(dy!.share());
			const dx = x.gradient?.target() ?? null;
			if (dx === null && !sums) return;
			device.run("mask_columns_backward", {
				...common,
				...gradients,
				dy: dy!,
				x: sums ? x : null,
				dx,
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
 * A parameter's masked values, for an operation that reads it as they are. `mask`: a factor for every element. The receiver
 * disposes it.
 */
export class MaskedValues implements Disposable {
	readonly values: Tensor;

	constructor(
		readonly parameter: Parameter,
		readonly mask: ColumnMask,
	) {
		const { value } = parameter;
		this.values = Tensor.empty(value.device, value.shape, value.dtype as FloatDtype);
		using x = value.view([1, value.elements]);
		using y = this.values.view([1, value.elements]);
		value.device.run("mask_columns_forward", {
			...this.#common,
			x,
			addend: null,
			y,
			x_stride: x.stride,
			addend_stride: x.stride,
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
			dfactors: this.mask.gradients,
			dscale: null,
			dy_stride: elements,
			x_stride: elements,
			dx_stride: elements,
			accumulate: 1,
			x_dtype: value.dtypeCode,
			gradient_dtype: dy.dtypeCode,
		});
	}

	get #common() {
		const width = this.parameter.value.elements;
		return { ...maskArguments({ columns: this.mask, scale: null }, width), row_count: null, rows: 1, width };
	}

	[Symbol.dispose](): void {
		this.values[Symbol.dispose]();
	}
}

/** The bias of masked experts, and their logits: docs/spec/elastic.md §10. */
export interface ScoreMask extends ColumnMask {
	/** Sigmoid scores are multiplied by the factor; if not, logits are. */
	readonly sigmoid: boolean;
	/** Bias of an expert whose factor is 0. */
	readonly blockedBias: number;
	/** The mask of the bias, where it is another than that of the logits. */
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
	const { factors } = mask;
	maskArguments({ columns: mask, scale: null }, logits.width);
	const { device } = tape;
	const common = { logits, factors, tokens: logits.rows, experts: logits.width };
	const wanted = wantsGradient(logits.gradient, { columns: mask, scale: null });
	const y = tape.output(Tensor.empty(device, logits.shape), wanted);
	const maskedBias = bias && Tensor.empty(device, bias.shape);
	const sigmoid = Number(mask.sigmoid);
	const blocked = { masked_bias: maskedBias, blocked_bias: mask.blockedBias };
	device.run("mask_scores_forward", { ...common, expert_bias: bias, y, ...blocked, sigmoid });
	if (mask.ofBias !== null) {
		const { factors } = mask.ofBias;
		device.run("mask_scores_forward", { ...common, factors, tokens: 0, expert_bias: bias, y, ...blocked, sigmoid });
	}
	tape.record({
		name: "mask_scores",
		outputs: [y],
		keep: [logits, mask.factors, mask.gradients],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const dlogits = logits.gradient?.contiguousTarget() ?? null;
			device.run("mask_scores_backward", { ...common, dy, dlogits, dfactors: mask.gradients, sigmoid });
			if (dlogits) logits.gradient!.accumulate(dlogits);
		},
	});
	return { logits: y, bias: maskedBias };
}
