/** Routing for benchmarks: random logits in the place of the router's (docs/spec/language-model.md §4.7). */
import { Distribution } from "../../native/abi.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";

/**
 * Overwrites logits_TE (f32) with draws of the standard normal distribution, so that every expert is as likely as any other.
 * The gradient of what takes their place goes to the router as if it were its own (straight through). A draw follows the key
 * and the token's place in the step's global batch: no layout changes it, and a second forward draws the same.
 */
export function drawLogits(logits: Tensor, seed: bigint, tokens: TokenSlice): void {
	let row = 0;
	for (const { first, count } of tokens.ranges) {
		using rows = logits.rowsFrom(row, count);
		row += count;
		logits.device.run("philox_fill", {
			y: rows,
			rows: count,
			width: logits.width,
			first_row: first,
			first_column: 0,
			full_width: logits.width,
			seed,
			a: 0,
			b: 1,
			distribution: Distribution.normal,
			dtype: logits.dtypeCode,
		});
	}
}
