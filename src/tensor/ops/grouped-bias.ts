/**
 * Biases added to rows: of one layer, or of the experts that rows are sorted by, times a factor a row
 * (docs/spec/moe-performance.md §1.6).
 */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, type Tensor } from "../tensor.ts";

export interface BiasOptions {
	/** int32 [experts + 1]: first row of every expert; null: one bias for all rows. */
	readonly offsets?: Tensor | null;
	/** f32 [rows]: factor of a row's bias. */
	readonly factor?: Tensor | null;
}

/**
 * y_RW + factor_R bias_gW for the rows of every expert g, written over y, which it takes over. Rows from the last offset
 * on are left alone. y: contiguous f32 or bf16, the bias [experts, W] or [W] of the same type.
 */
export function addBias(tape: Tape, y: Tensor, bias: Parameter, options: BiasOptions = {}): Tensor {
	const { device } = tape;
	const { offsets = null, factor = null } = options;
	const groups = bias.value.elements / y.width;
	if (!y.contiguous || (offsets ? offsets.elements - 1 : 1) !== groups) {
		throw new RangeError(`${bias.name} of shape [${bias.shape}] cannot be added to rows of shape [${y.shape}].`);
	}
	const args = { offsets, factor, rows: y.rows, groups, width: y.width, dtype: y.dtypeCode };
	device.run("grouped_bias_forward", { ...args, bias: bias.value, y });
	const before = y.gradient;
	const sum = before ? y : tape.output(y, bias.trainable || (factor?.gradient ?? null) !== null);
	tape.record({
		name: "add_bias",
		outputs: [sum],
		keep: [offsets, factor],
		parameters: [bias],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const dfactor = factor?.gradient?.contiguousTarget() ?? null;
			const dbias = bias.mainGradient;
			if (dbias || dfactor) {
				device.run("grouped_bias_backward", {
					...args,
					dy,
					bias: bias.value,
					dbias,
					dfactor,
					accumulate_dfactor: 0,
				});
			}
			if (dfactor) factor!.gradient!.accumulate(dfactor);
			// On to what made the rows, which was recorded before.
			before?.accumulate(dy.share());
		},
	});
	return sum;
}
