/** Token copies on their way to their experts and back, as every token dispatcher takes and gives them. */
import type { E4m3Rows } from "../../../tensor/ops/e4m3-rows.ts";
import type { Tensor } from "../../../tensor/tensor.ts";

/** Rows of this rank's experts, side by side by expert. */
export interface ExpertRows extends Disposable {
	/** f32 or bf16, or the bytes of `inE4m3`. */
	readonly rows: Tensor;
	/** The rows in e4m3; null: experts do not read e4m3, or an exchange wrote the rows. */
	readonly inE4m3: E4m3Rows | null;
	/** f32: the routing weight of every row. */
	readonly rowProbability: Tensor;
	/** i32 [local experts + 1]: first row of every expert. */
	readonly offsets: Tensor;
}

/**
 * Moves the rows of one layer. The constructor starts the dispatch; then the methods are called once each, in this order. Work that
 * is queued between a start and its finish hides the exchange.
 */
export interface TokenDispatcher extends Disposable {
	finishDispatch(): ExpertRows;
	startCombine(outputs: Tensor): void;
	/** y_TW = Σ over a token's experts of their outputs. */
	finishCombine(): Tensor;
}

/** Takes over all but the offsets. */
export function expertRows({ rows, inE4m3, rowProbability, offsets }: Omit<ExpertRows, keyof Disposable>): ExpertRows {
	return {
		rows,
		inE4m3,
		rowProbability,
		offsets,
		[Symbol.dispose]() {
			for (const owned of [rows, inE4m3, rowProbability]) owned?.[Symbol.dispose]();
		},
	};
}
