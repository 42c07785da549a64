/** Ready-made token rows: the tensor `tokens` of a safetensors file. */
import { openSafetensors } from "../../checkpoint/safetensors.ts";
import { UserError } from "../../native/errors.ts";

/** Rows of S + 1 token ids: i32 or i64 [..., S + 1], all leading dimensions taken as samples in order. */
export function readTokenRows(path: string, sequenceLength: number): Int32Array {
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
	return values instanceof Int32Array ? values : Int32Array.from(values as BigInt64Array, Number);
}
