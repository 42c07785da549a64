/** The microbatches of a mimo-* folder: token ids from its file, images from the integer hash its config.json gives. */
import { join } from "node:path";
import { openSafetensors } from "../../checkpoint/index.ts";
import { type ImageSet, patchify } from "../../data/images.ts";
import type { ImageTextMicrobatch } from "../../data/microbatch.ts";
import { visionModule } from "../../parallel/index.ts";
import { UserError } from "../../system/errors.ts";
import type { MimoGoldenConfig } from "./golden.ts";
import { hasImage } from "./golden-checks.ts";

const no: ImageSet = { patches: new Float32Array(0), grids: [], imagesPerSample: [0] };

/** Values of image s: a hash of the element's index and s, the same on every machine. */
export function hashImage(elements: number, s: number, scale: number): Float32Array {
	const image = new Float32Array(elements);
	const start = Math.imul(s, 0x85ebca77);
	const factor = Math.fround(scale);
	for (let n = 0; n < elements; n++) {
		let h = (Math.imul(n, 0x9e3779b1) + start) >>> 0;
		h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
		h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
		h = (h ^ (h >>> 16)) >>> 0;
		image[n] = Math.fround(h / 2 ** 31 - 1) * factor;
	}
	return image;
}

export class MimoBatches {
	readonly #ids: Int32Array;
	readonly #labels: Int32Array;
	readonly #mask: Uint8Array;
	/** Samples from a lane's image to its next one in the data set of the encoder rank that reads them. */
	readonly #stride: number;

	constructor(
		folder: string,
		readonly config: MimoGoldenConfig,
	) {
		const { steps, lanes, microbatches_per_lane: perLane } = config.data;
		const shape = [steps, lanes, perLane, config.language_model.sequence_length];
		using file = openSafetensors(join(folder, "batches.safetensors"));
		const read = (name: string, dtype: string) => {
			const found = file.information(name);
			if (found.dtype !== dtype || String(found.shape) !== String(shape)) {
				throw new UserError(
					`${name} in ${file.path} is ${found.dtype} [${found.shape}]; config.json needs ${dtype} [${shape}].`,
				);
			}
			return file.read(name);
		};
		this.#ids = read("input_ids", "I32") as Int32Array;
		this.#labels = read("labels", "I32") as Int32Array;
		this.#mask = read("loss_mask", "U8") as Uint8Array;
		const stored = Float32Array.from(file.read("images") as Float32Array);
		// Where an encoder rank served several lanes, their samples came in turns out of its one data set.
		const served = Math.max(1, lanes / config.layout.encoder.data_parallel);
		const differing = [served, 1].map((stride) => ({ stride, at: firstOther(config, stride, stored) }));
		const fitting = differing.find(({ at }) => at === null);
		if (fitting === undefined) {
			const [step, lane, microbatch] = differing.at(-1)!.at!;
			throw new UserError(
				`Image ${microbatch} of lane ${lane}, step ${step + 1} in ${file.path} is not that of config.json's image_hash.`,
			);
		}
		this.#stride = fitting.stride;
	}

	/** All lanes' microbatches of a step, lane after lane. */
	step(step: number): ImageTextMicrobatch[] {
		const { lanes, microbatches_per_lane: perLane } = this.config.data;
		return Array.from({ length: lanes * perLane }, (_, sample) =>
			this.microbatch(step, Math.floor(sample / perLane), sample % perLane),
		);
	}

	/** A lane's microbatch, one sample; step, lane and microbatch from 0. */
	microbatch(step: number, lane: number, microbatch: number): ImageTextMicrobatch {
		const { lanes, microbatches_per_lane: perLane } = this.config.data;
		const length = this.config.language_model.sequence_length;
		const begin = ((step * lanes + lane) * perLane + microbatch) * length;
		const part = <Values extends Int32Array | Uint8Array>(values: Values) =>
			values.subarray(begin, begin + length) as Values;
		const text = {
			ids: part(this.#ids),
			labels: part(this.#labels),
			lossMask: Float32Array.from(part(this.#mask)),
			lengths: [length],
		};
		const images = hasImage(this.config, step, lane, microbatch) ? this.#image(step, lane, microbatch) : no;
		return { text, features: { [visionModule]: images } };
	}

	#image(step: number, lane: number, microbatch: number): ImageSet {
		const { vision } = this.config;
		const values = imageOf(this.config, this.#stride, [step, lane, microbatch]);
		const [rows, columns, p] = [vision.grid_rows, vision.grid_columns, vision.patch_size];
		const patches = vision.resolution === "fixed" ? patchify(values, rows * p, columns * p, p) : values;
		return { patches, grids: [{ rows, columns }], imagesPerSample: [1] };
	}
}

/** Step, lane and microbatch, from 0. */
type SamplePlace = readonly [step: number, lane: number, microbatch: number];

function imageOf({ data }: MimoGoldenConfig, stride: number, [step, lane, microbatch]: SamplePlace): Float32Array {
	const elements = data.image_shape.reduce((product, size) => product * size, 1);
	const sample = step * data.microbatches_per_lane + microbatch;
	return hashImage(elements, data.image_hash.first_seed_per_lane[lane]! + stride * sample, data.image_hash.scale);
}

/**
 * The file's images, of the first steps, must be those of the hash bit for bit, zeros where a sample has none: the first
 * that is not, or null.
 */
function firstOther(config: MimoGoldenConfig, stride: number, stored: Float32Array): SamplePlace | null {
	const { lanes, microbatches_per_lane: perLane, image_shape: shape } = config.data;
	const elements = shape.reduce((product, size) => product * size, 1);
	for (let index = 0; index * elements < stored.length; index++) {
		const lane = Math.floor(index / perLane) % lanes;
		const place = [Math.floor(index / perLane / lanes), lane, index % perLane] as const;
		const wanted = hasImage(config, ...place) ? imageOf(config, stride, place) : new Float32Array(elements);
		const found = stored.subarray(index * elements, (index + 1) * elements);
		if (wanted.some((value, i) => value !== found[i])) return place;
	}
	return null;
}
