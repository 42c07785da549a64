/** Ranks of one lane take the same microbatches: the first reads them and broadcasts them to the others. */

import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import type { PatchGrid } from "../../models/radio/config.ts";
import type { Device } from "../../native/device.ts";
import type { Group } from "../../parallel/index.ts";
import { Tensor } from "../../tensor/index.ts";

export interface Lane {
	/** Whether this rank reads. */
	readonly reads: boolean;
	/** Returns the reader's microbatches on every rank of the lane. Collective over the lane. */
	share(own: readonly ImageTextMicrobatch[] | null): readonly ImageTextMicrobatch[];
}

/** A lane of one rank. */
export const ownLane: Lane = {
	reads: true,
	share: (own) => own!,
};

/** `group`: ranks of one lane; the first one reads. */
export function laneOf(group: Group, device: Device): Lane {
	if (group.size === 1) return ownLane;
	const reads = group.rank === 0;
	return {
		reads,
		share: (own) => {
			const bytes = reads ? packMicrobatches(own!) : null;
			const [length] = group.exchange(Int32Array.of(bytes?.length ?? 0))[0]!;
			using tensor = bytes === null ? Tensor.empty(device, [length!], "u8", "data") : Tensor.from(device, bytes);
			group.broadcast(tensor, 0).wait();
			if (reads) return own!;
			const received = new Uint8Array(length!);
			device.copyToHost(received, tensor);
			return unpackMicrobatches(received);
		},
	};
}

/** A microbatch without its large arrays. */
interface Outline {
	readonly tokens: number;
	readonly lengths: readonly number[];
	readonly samples?: readonly number[];
	readonly padding?: number;
	readonly values: number;
	readonly grids: readonly PatchGrid[];
	readonly imagesPerSample: readonly number[];
	readonly indices?: readonly number[];
}

/** Serialises microbatches: a JSON outline of all, then the raw ids, labels, masks and patches of each. */
export function packMicrobatches(microbatches: readonly ImageTextMicrobatch[]): Uint8Array {
	const outlines = microbatches.map(({ text, images }): Outline => {
		const { ids, labels: _, lossMask: __, ...rest } = text;
		const { patches, ...places } = images;
		return { ...rest, ...places, tokens: ids.length, values: patches.length };
	});
	const outline = new TextEncoder().encode(JSON.stringify(outlines));
	const arrays = microbatches.flatMap(({ text, images }) => [text.ids, text.labels, text.lossMask, images.patches]);
	const begin = 4 * Math.ceil(outline.length / 4) + 4;
	const bytes = new Uint8Array(begin + arrays.reduce((sum, array) => sum + array.byteLength, 0));
	new DataView(bytes.buffer).setUint32(0, outline.length, true);
	bytes.set(outline, 4);
	let at = begin;
	for (const array of arrays) {
		bytes.set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength), at);
		at += array.byteLength;
	}
	return bytes;
}

/** Deserialises packMicrobatches' bytes; the arrays are views of `bytes`. */
export function unpackMicrobatches(bytes: Uint8Array): ImageTextMicrobatch[] {
	const { buffer, byteOffset } = bytes;
	const length = new DataView(buffer, byteOffset).getUint32(0, true);
	const outlines = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))) as Outline[];
	let at = byteOffset + 4 + 4 * Math.ceil(length / 4);
	const place = (count: number): [ArrayBufferLike, number, number] => {
		at += 4 * count;
		return [buffer, at - 4 * count, count];
	};
	return outlines.map(({ tokens, values, lengths, samples, padding, ...images }) => ({
		text: {
			ids: new Int32Array(...place(tokens)),
			labels: new Int32Array(...place(tokens)),
			lossMask: new Float32Array(...place(tokens)),
			lengths,
			...(samples && { samples }),
			...(padding !== undefined && { padding }),
		},
		images: { patches: new Float32Array(...place(values)), ...images },
	}));
}
