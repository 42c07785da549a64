/** batches.safetensors of a reference folder of a language model that Megatron-LM trained. */
import { join } from "node:path";
import { openSafetensors } from "../checkpoint/index.ts";
import { type ImageTextMicrobatch, withoutImages } from "../data/microbatch.ts";
import { UserError } from "../system/errors.ts";

export interface BatchSizes {
	readonly batch: number;
	readonly microbatches: number;
	readonly seq: number;
}

/**
 * tokens i32 [steps, microbatches, batch, seq + 1] and loss_mask u8 [steps, microbatches, batch, seq] as samples of every step.
 * Throws where type or shape differ.
 */
export function readTokenBatches(
	folder: string,
	{ batch, microbatches, seq }: BatchSizes,
	steps: number,
): ImageTextMicrobatch[][] {
	using file = openSafetensors(join(folder, "batches.safetensors"));
	const read = (name: string, dtype: string, width: number) => {
		const { dtype: stored, shape } = file.information(name);
		const wanted = [steps, microbatches, batch, width];
		if (stored !== dtype || String(shape) !== String(wanted)) {
			throw new UserError(`${name} in ${file.path} is ${stored} [${shape}]; config.json needs ${dtype} [${wanted}].`);
		}
		return file.read(name);
	};
	const tokens = read("tokens", "I32", seq + 1) as Int32Array;
	const masks = read("loss_mask", "U8", seq) as Uint8Array;
	return Array.from({ length: steps }, (_, step) =>
		Array.from({ length: microbatches * batch }, (_, row) => {
			const sample = step * microbatches * batch + row;
			const ids = tokens.subarray(sample * (seq + 1), (sample + 1) * (seq + 1));
			return withoutImages({
				ids: ids.slice(0, -1),
				labels: ids.slice(1),
				lossMask: Float32Array.from(masks.subarray(sample * seq, (sample + 1) * seq)),
				lengths: [seq],
			});
		}),
	);
}
