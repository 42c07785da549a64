/** Dropout whose mask depends on the element's place in the whole tensor alone, so that no layout changes it. */
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

export interface DropoutOptions {
	/** Chance of an element to become zero, in [0, 1). */
	readonly probability: number;
	readonly seed: number | bigint;
	/** Global index of row 0: of the token, counted over the whole batch. */
	readonly firstRow?: number;
	/** Where these columns stand in rows of `fullWidth`. */
	readonly firstColumn?: number;
	readonly fullWidth?: number;
}

/** y = x * kept / (1 - probability). x_TW contiguous, f32 or bf16. Nothing is done, nor stored, at probability 0. */
export function dropout(tape: Tape, x: Tensor, options: DropoutOptions): Tensor {
	if (!x.contiguous) throw new RangeError(`dropout takes a contiguous tensor, not rows ${x.stride} apart.`);
	if (options.probability === 0) return x.share();
	const { device } = tape;
	const run = (from: Tensor, to: Tensor) =>
		device.run("dropout", {
			x: from,
			y: to,
			rows: from.rows,
			width: from.width,
			first_row: options.firstRow ?? 0,
			first_column: options.firstColumn ?? 0,
			full_width: options.fullWidth ?? from.width,
			seed: options.seed,
			probability: options.probability,
			dtype: from.dtypeCode,
		});
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
