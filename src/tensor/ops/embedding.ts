/** Rows of a table by token id (docs/spec/language-model.md §5.1). */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

export interface EmbeddingOptions {
	/** First id of a table that is a shard of the vocabulary; default 0. */
	readonly vocabularyStart?: number;
	/** Factor of the rows; default 1. */
	readonly scale?: number;
	/** Id whose row gets no gradient; default null: none. */
	readonly paddingId?: number | null;
}

/**
 * y_TH = scale · table_VH[ids_T - vocabularyStart], rounded once. ids are i32. A table that is one shard of the vocabulary gives zeros for the
 * ids of other shards, so that the sum over shards is the embedding.
 */
export function embedding(
	tape: Tape,
	ids: Tensor,
	table: Parameter,
	{ vocabularyStart = 0, scale = 1, paddingId = null }: EmbeddingOptions = {},
): Tensor {
	const { device } = tape;
	const [vocabularyRows, width] = table.shape as [number, number];
	const shape = {
		tokens: ids.elements,
		width,
		vocabulary_start: vocabularyStart,
		vocabulary_rows: vocabularyRows,
		scale,
	};
	const y = tape.output(Tensor.empty(device, [ids.elements, width], table.value.dtype), table.trainable);
	device.run("embedding_forward", { ...shape, table: table.value, ids, y, dtype: y.dtypeCode });
	tape.record({
		name: "embedding",
		outputs: [y],
		keep: [ids],
		parameters: [table],
		backward: ([gradient]) => {
			// Never late, like the output layer, which may add to the same gradient.
			using dy = contiguous(gradient!);
			const operands = { dy, ids, dtable: table.mainGradient, padding_id: paddingId ?? -1, dtype: dy.dtypeCode };
			device.run("embedding_backward", { ...shape, ...operands });
		},
	});
	return y;
}
