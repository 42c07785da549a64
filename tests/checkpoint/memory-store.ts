/** A store of float32 tensors in memory. */
import { bytesOf } from "../../src/checkpoint/dtype.ts";
import type { TensorStore } from "../../src/checkpoint/store.ts";

export function memoryStore(
	tensors: Readonly<Record<string, { readonly shape: readonly number[]; readonly values: Float32Array }>>,
): TensorStore {
	return {
		path: "memory",
		tensors: new Map(Object.entries(tensors).map(([name, { shape }]) => [name, { dtype: "F32", shape }])),
		readInto: (name, offset, into) =>
			into.set(bytesOf(tensors[name]!.values).subarray(offset, offset + into.byteLength)),
		[Symbol.dispose]: () => {},
	};
}
