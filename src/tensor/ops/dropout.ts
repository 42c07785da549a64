/** Dropout whose mask depends on the element's place in the whole tensor alone, so that no layout changes it. */

import { TokenSlice } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

export interface DropoutOptions {
	/** Chance of an element to become zero, in [0, 1). */
	readonly probability: number;
	readonly seed: number | bigint;
	/** The tokens of the whole batch that the rows hold; default: the first ones. */
	readonly rows?: TokenSlice;
	/** Place of the first column in rows of `fullWidth`. */
	readonly firstColumn?: number;
	readonly fullWidth?: number;
}

/** y = x * kept / (1 - probability). x_TW contiguous, f32 or bf16. At probability 0 x itself is returned. */
export function dropout(tape: Tape, x: Tensor, options: DropoutOptions): Tensor {
	if (!x.contiguous) throw new RangeError(`dropout takes a contiguous tensor, not rows ${x.stride} apart.`);
	if (options.probability === 0) return x.share();
	const { device } = tape;
	const { ranges } = options.rows ?? TokenSlice.of(0, x.rows);
	const run = (from: Tensor, to: Tensor) => {
		let row = 0;
		for (const { first, count } of ranges) {
			using source = from.rowsFrom(row, count);
			using target = to.rowsFrom(row, count);
			row += count;
			device.run("dropout", {
				x: source,
				y: target,
				rows: count,
				width: from.width,
				first_row: first,
				first_column: options.firstColumn ?? 0,
				full_width: options.fullWidth ?? from.width,
				seed: options.seed,
				probability: options.probability,
				dtype: from.dtypeCode,
			});
		}
	};
	const y = tape.output(Tensor.empty(device, x.shape, x.dtype), x.gradient !== null);
	run(x, y);
	tape.record({
		name: "dropout",
		outputs: [y],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const dx = Tensor.empty(device, x.shape, x.dtype);
			run(dy, dx);
			x.gradient!.accumulate(dx);
		},
	});
	return y;
}
