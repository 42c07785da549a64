/** The weights of a checkpoint of any format, under logical names. */
import { type ModelDescription, requireSameModel } from "../../config/same-model.ts";
import type { TensorStore } from "../store.ts";
import { openSource } from "./convert.ts";
import { requireFormat } from "./source.ts";

/**
 * Opens the model tensors of `path`, a Hugging Face folder, a native or a torch_dist checkpoint. Throws a UserError where it
 * says that they are of another model than `expected`.
 */
export function openWeights(path: string, expected: ModelDescription = {}): TensorStore {
	const { weights, model } = openSource(path, requireFormat(path, null), {
		optimizer: false,
		allowFallback: false,
		visionHeads: null,
		newLayers: { seed: 0, sizes: {} },
		pattern: null,
		inert: [],
	});
	requireSameModel(path, model, expected);
	return weights;
}
