/** Frames of fixed width that an encoder reads beside a sample's text: as many of every sample. */
import { openSafetensors } from "../checkpoint/index.ts";
import { UserError } from "../system/errors.ts";
import { MersenneTwister, seedByInteger } from "./energon/random/mersenne-twister.ts";
import type { ImageSet } from "./images.ts";

export interface FrameSize {
	/** Frames of a sample, and values of a frame. */
	readonly frames: number;
	readonly width: number;
}

/** Returns the frames of a sample by its number, [frames, width] in a row. */
export type FrameReader = (sample: number) => Float32Array;

/** Frames drawn from [−1, 1), those of sample i from MT19937 seeded by `seed` + i. */
export function drawnFrames({ frames, width }: FrameSize, seed: number): FrameReader {
	return (sample) => {
		const random = new MersenneTwister(seedByInteger(seed + sample));
		return Float32Array.from({ length: frames * width }, () => random.u32() / 2 ** 31 - 1);
	};
}

/**
 * Frames of a safetensors file: its tensor `frames`, F32 [samples, frames, width]; after the last sample comes the first. Throws a
 * UserError for a tensor of another type or shape.
 */
export function storedFrames({ frames, width }: FrameSize, path: string): FrameReader {
	using file = openSafetensors(path);
	const { dtype, shape } = file.information("frames");
	const fits = shape.length === 3 && shape[1] === frames && shape[2] === width && shape[0]! > 0;
	if (dtype !== "F32" || !fits) {
		throw new UserError(
			`frames in ${path} is ${dtype} [${shape.join(", ")}]; frames and frame-width need F32 [samples, ${frames}, ${width}].`,
		);
	}
	const values = file.read("frames") as Float32Array;
	const [samples, size] = [shape[0]!, frames * width];
	return (sample) => values.subarray((sample % samples) * size, ((sample % samples) + 1) * size);
}

/** The frames of consecutive samples, one item each. */
export function frameSet({ frames, width }: FrameSize, read: FrameReader, first: number, count: number): ImageSet {
	const patches = new Float32Array(count * frames * width);
	for (let sample = 0; sample < count; sample++) patches.set(read(first + sample), sample * frames * width);
	return {
		patches,
		grids: new Array(count).fill({ rows: frames, columns: 1 }),
		imagesPerSample: new Array<number>(count).fill(1),
	};
}
