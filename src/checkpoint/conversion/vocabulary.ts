/** Rows of embedding and output layer beside the vocabulary's (docs/spec/checkpoint.md §5.4). */
import { UserError } from "../../system/errors.ts";
import { elementCount } from "../dtype.ts";
import { MappedStore, type MappedTensor } from "../mapping.ts";
import type { TensorStore } from "../store.ts";
import type { SourceCheckpoint } from "./source.ts";

const vocabularyTensor =
	/^(?:optimizer\.state\.[^.]+\.)?language_model\.(?:embedding\.word_embeddings|output_layer)\.weight$/;

/** The tensors of `weights`; tensors with a row for each token get `rows` rows: zeros are added, or padding rows cut off. */
export function padVocabulary(weights: TensorStore, rows: number, source: SourceCheckpoint): TensorStore {
	const least = source.configuration?.vocabSize ?? 0;
	if (rows < least) throw new UserError(`${rows} rows are too few for a vocabulary of ${least} tokens.`);
	const plan = [...weights.tensors].map(([name, { dtype, shape }]): MappedTensor => {
		const kept = vocabularyTensor.test(name) ? Math.min(rows, shape[0]!) : (shape[0] ?? 1);
		const length = (elementCount(shape)! / (shape[0] || 1)) * kept || elementCount(shape)!;
		const whole = { offset: 0, stride: length };
		return {
			name,
			dtype,
			shape: vocabularyTensor.test(name) ? shape.with(0, rows) : shape,
			copies: [{ source: name, from: whole, to: whole, count: 1, length }],
		};
	});
	return new MappedStore(weights, plan);
}
