/**
 * --moe-router-force-load-balancing: random logits in place of the router's, for benchmarks (docs/spec/language-model.md §4.7).
 */
import { Distribution } from "../../native/abi.ts";
import type { Tensor, TokenSlice } from "../../tensor/index.ts";

/**
 * Overwrites logits_TE (f32) with standard normal draws, which make every expert equally likely. The gradient of the drawn logits
 * goes to the router unchanged (straight through). A draw depends on the key and the token's index in the step's global batch, so
 * no layout changes it and a recomputed forward draws the same.
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
