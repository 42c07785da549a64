/** The output layer of a model whose embedding is its output layer. */

import { UserError } from "../../system/errors.ts";
import { readPieces, selectTensors, type TensorStore } from "../store.ts";
import type { Spelling } from "./families/family.ts";
import { familyOf } from "./families/index.ts";

/** A tied model's lm_head may be stored all the same; then it must be the embedding. */
export function withoutTiedHead(folder: TensorStore, spelling: Spelling): TensorStore {
	const [head, embedding] = [`${spelling.head}lm_head.weight`, spelling.base + familyOf(spelling).embedding];
	if (!folder.tensors.has(head)) return folder;
	const other = readPieces(folder, embedding);
	for (const piece of readPieces(folder, head)) {
		if (Buffer.compare(piece, other.next().value ?? new Uint8Array(0)) !== 0) {
			throw new UserError(`${folder.path}: tie_word_embeddings is true, but ${head} differs from ${embedding}.`);
		}
	}
	return selectTensors(folder, (name) => name !== head);
}
