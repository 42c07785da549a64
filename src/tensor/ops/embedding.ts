/** Rows of a table by token id (docs/spec/language-model.md §5.1). */
import type { Parameter } from "../parameter.ts";
import type { Tape } from "../tape.ts";
import { contiguous, Tensor } from "../tensor.ts";

/**
 * y_TH = table_VH[ids_T - vocabularyStart]. ids are i32. A table that is one shard of the vocabulary gives zeros for the
 * ids of other shards, so that the sum over shards is the embedding.
 */
export function embedding(tape: Tape, ids: Tensor, table: Parameter, vocabularyStart = 0): Tensor {
	const { device } = tape;
	const [vocabularyRows, width] = table.shape as [number, number];
	const shape = {
		tokens: ids.elements,
		width,
		vocabulary_start: vocabularyStart,
		vocabulary_rows: vocabularyRows,
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
			device.run("embedding_backward", { ...shape, dy, ids, dtable: table.mainGradient, dtype: dy.dtypeCode });
		},
	});
	return y;
}
