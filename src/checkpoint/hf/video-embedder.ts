/**
 * The embedder of videos that transformers' class has beside that of pictures. A model that was made without one gets it from
 * the picture's: tiled over the frames that are joined and divided by their number (docs/spec/vision.md §1.9), so that frames of one
 * picture look as the picture does.
 */

import { decodeFloats, encodeFloats } from "../cast-floats.ts";
import { dtypes } from "../dtype.ts";
import { type TensorStore, typeOf } from "../store.ts";
import { outsideNames, type TowerSpelling } from "./tower-names.ts";

export function videoEmbedderName({ prefix, style }: TowerSpelling): string {
	return `${prefix}${style === "published" ? "patch_generator.video_embedder" : "embeddings.video_patch_projection"}.weight`;
}

/** A store of that one tensor, made of the tower's tensors as `source` names them. */
export function grownVideoEmbedder(source: TensorStore, spelling: TowerSpelling, frames: number): TensorStore {
	const picture = outsideNames(spelling).embedder;
	const { dtype, shape } = typeOf(source, picture);
	const [rows, width] = shape as [number, number];
	const bytes = dtypes[dtype].bits / 8;
	return {
		path: source.path,
		tensors: new Map([[videoEmbedderName(spelling), { dtype, shape: [rows, frames * width] }]]),
		readInto: (_, offset, into) => {
			const row = new Uint8Array(width * bytes);
			for (let done = 0; done < into.byteLength; ) {
				const at = offset + done;
				source.readInto(picture, Math.floor(at / (frames * row.length)) * row.length, row);
				const scaled = encodeFloats(
					dtype,
					Float64Array.from(decodeFloats(dtype, row), (value) => value / frames),
				);
				const part = scaled.subarray(at % row.length, (at % row.length) + into.byteLength - done);
				into.set(part, done);
				done += part.length;
			}
		},
		[Symbol.dispose]: () => {},
	};
}
