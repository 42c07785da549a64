/** Tensors without values: plans are made of names and shapes alone. */
import type { TensorStore, TensorType } from "../../src/checkpoint/store.ts";
import { inputName } from "./parser.ts";

export function shapesStore(tensors: ReadonlyMap<string, TensorType>): TensorStore {
	return {
		path: inputName,
		tensors,
		readInto: () => {
			throw new Error("A plan read values.");
		},
		[Symbol.dispose]: () => {},
	};
}
