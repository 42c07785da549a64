/** The weights of a checkpoint of any format, under logical names. */
import type { TensorStore } from "../store.ts";
import { openSource } from "./convert.ts";
import { requireFormat } from "./source.ts";

/** Opens the model tensors of `path`, a Hugging Face folder, a native or a torch_dist checkpoint. */
export function openWeights(path: string): TensorStore {
	const { weights } = openSource(path, requireFormat(path, null), {
		optimizer: false,
		allowFallback: false,
		visionHeads: null,
		pattern: null,
		inert: [],
	});
	return weights;
}
