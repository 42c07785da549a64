/** The interface of token dispatchers, which send tokens' rows to their experts and the outputs back. */
import type { E4m3Rows, Tensor } from "../../../tensor/index.ts";

/** The rows of this rank's experts, sorted by expert. */
export interface ExpertRows extends Disposable {
	/** f32 or bf16, or the bytes of `inE4m3`. */
	readonly rows: Tensor;
	/** The rows in e4m3; null: experts read no e4m3, or the exchange did not round the rows. */
	readonly inE4m3: E4m3Rows | null;
	/** f32: routing weight of each row. */
	readonly rowProbability: Tensor;
	/** i32 [local experts + 1]: first row of each expert. */
	readonly offsets: Tensor;
}

/**
 * Moves the rows of one layer. The constructor starts the dispatch; the methods are then called once each, in this order. Work
 * queued between a start and its finish hides the exchange.
 */
export interface TokenDispatcher extends Disposable {
	finishDispatch(): ExpertRows;
	startCombine(outputs: Tensor): void;
	/** y_TW = Σ over a token's experts of their outputs. */
	finishCombine(): Tensor;
}

/** Takes ownership of all but the offsets. */
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
