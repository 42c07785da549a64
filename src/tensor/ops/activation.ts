/**
 * Activations of feed-forward layers and experts (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2,
 * §1.3).
 */
import { Activation, type ActivationName } from "../../native/abi.ts";
import { isGatedActivation } from "../../native/activations.ts";
import { type Mask, maskArguments, maskGradients, maskTensors, wantsGradient } from "../column-mask.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

/** Options of gated kinds; defaults: x is two halves, no clamp, nothing added. */
export interface GatedOptions {
	/** Columns of each block of x, which alternate between gate and linear; 0: the gate half, then the linear half. */
	readonly interleave?: number;
	/** Gate at most this, linear half within ± this. */
	readonly clamp?: number;
	/** Added to the linear half of quick GEGLU. */
	readonly linearOffset?: number;
}

export interface ActivationOptions extends GatedOptions {
	/** Factor of every row, f32 [rows]: a routing weight, applied before the second projection. */
	readonly rowProbability?: Tensor | null;
	/** Multiplies the columns of x (docs/spec/elastic.md §9). */
	readonly mask?: Mask | null;
}

/**
 * y = rowProbability * act(mask x), in fp32 with one rounding. x_RW f32 or bf16, W twice the output's for gated kinds. Only
 * the live rows of x are computed.
 */
export function activation(tape: Tape, x: Tensor, kind: ActivationName, options: ActivationOptions = {}): Tensor {
	const { device } = tape;
	const { rowProbability = null, mask = null } = options;
	const width = isGatedActivation(kind) ? x.width / 2 : x.width;
	if (!x.contiguous || !Number.isInteger(width)) {
		throw new RangeError(`${kind} cannot read a tensor of shape [${x.shape}] and stride ${x.stride}.`);
	}
	const args = {
		x,
		row_probability: rowProbability,
		row_count: x.rowCount,
		rows: x.rows,
		width,
		interleave: options.interleave ?? 0,
		clamp: options.clamp ?? Number.POSITIVE_INFINITY,
		linear_offset: options.linearOffset ?? 0,
		kind: Activation[kind],
		dtype: x.dtypeCode,
	};
	const masks = mask && maskArguments(mask, x.width);
	const wanted = wantsGradient(x.gradient, mask) || (rowProbability?.gradient ?? null) !== null;
	using all = tape.output(Tensor.empty(device, [...x.shape.slice(0, -1), width], x.dtype), wanted);
	const y = all.withRowCount(x.rowCount);
	if (masks) device.run("masked_activation_forward", { ...args, ...masks, y });
	else device.run("activation_forward", { ...args, y });
	tape.record({
		name: "activation",
		outputs: [y],
		keep: [x, rowProbability, x.rowCount, ...(mask ? maskTensors(mask) : [])],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const dx = x.gradient?.contiguousTarget() ?? Tensor.empty(device, x.shape, x.dtype, "workspace");
			const drowProbability = rowProbability?.gradient?.contiguousTarget() ?? null;
			const operands = { ...args, dy, dx, drow_probability: drowProbability };
			if (mask) device.run("masked_activation_backward", { ...operands, ...masks!, ...maskGradients(mask) });
			else device.run("activation_backward", operands);
			if (x.gradient) x.gradient.accumulate(dx);
			else dx[Symbol.dispose]();
			if (drowProbability) rowProbability!.gradient!.accumulate(drowProbability);
		},
	});
	return y;
}
