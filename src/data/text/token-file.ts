/** Ready-made token rows: the tensor `tokens` of a safetensors file. */
import { openSafetensors } from "../../checkpoint/index.ts";
import { UserError } from "../../system/errors.ts";

/**
 * Rows of S + 1 token ids: i32 or i64 [..., S + 1], all leading dimensions taken as samples in order. Throws a UserError
 * for an id outside the vocabulary.
 */
export function readTokenRows(path: string, sequenceLength: number, vocabularySize: number): Int32Array {
	using file = openSafetensors(path);
	const { dtype, shape } = file.information("tokens");
	if (dtype !== "I32" && dtype !== "I64") {
		throw new UserError(`tokens in ${path} is ${dtype}; token ids are I32 or I64.`);
	}
	if (shape.at(-1) !== sequenceLength + 1 || shape.length < 2) {
		throw new UserError(
			`tokens in ${path} has shape [${shape.join(", ")}]; seq-length ${sequenceLength} needs [samples, ${sequenceLength + 1}].`,
		);
	}
	const values = file.read("tokens");
	if (values.length === 0) throw new UserError(`tokens in ${path} holds no samples.`);
	// 64-bit ids are compared before they are cut to 32 bits.
	checkVocabulary(values as Int32Array | BigInt64Array, vocabularySize, path);
	return values instanceof Int32Array ? values : Int32Array.from(values as BigInt64Array, Number);
}

/** Throws a UserError that names the first token outside the vocabulary of the file `path`. */
export function checkVocabulary(tokens: Int32Array | BigInt64Array, vocabularySize: number, path: string): void {
	const most = tokens instanceof Int32Array ? vocabularySize : BigInt(vocabularySize);
	for (let i = 0; i < tokens.length; i++) {
		const id = tokens[i]!;
		if (id >= 0 && id < most) continue;
		throw new UserError(`Token ${i} of ${path} is ${id}, outside the vocabulary of vocab-size ${vocabularySize}.`);
	}
}
