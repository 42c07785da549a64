/**
 * Images, or other items, as an encoder reads them: patches of one width, item after item (docs/spec/vision.md §2.1). A sound is a
 * grid of one column, whose patches are its frames.
 */
import type { PatchGrid, Tower } from "../models/tower.ts";
import type { Device } from "../native/device.ts";
import { cast, Tensor } from "../tensor/index.ts";

export interface ImageSet {
	/**
	 * [Σ rows · columns, 3p²]: patches row-major over an image's grid, a patch's values channel by channel, or of a channel frame by
	 * frame where patches have several; a picture may have one, which the others repeat. Empty where a device
	 * only counts (planning).
	 */
	readonly patches: Float32Array;
	readonly grids: readonly PatchGrid[];
	/** Images of every sample, or pack of samples; 0 for text alone. */
	readonly imagesPerSample: readonly number[];
	/**
	 * Place of every image among those of the step's global batch, which random crops follow; absent: they follow the
	 * images that this rank had before in the step.
	 */
	readonly indices?: readonly number[];
}

/** Images with their indices in the step's global batch. */
export type PlacedImages = ImageSet & Required<Pick<ImageSet, "indices">>;

/** The images of a step's microbatches of one rank; those that do not say their places have those after the ones before. */
export function placesInStep(microbatches: readonly ImageSet[]): PlacedImages[] {
	let first = 0;
	return microbatches.map((images) => {
		first += images.grids.length;
		const before = first - images.grids.length;
		return { ...images, indices: images.indices ?? images.grids.map((_, image) => before + image) };
	});
}

/** No images of `samples` samples of text alone. */
export function noImages(samples: number): ImageSet {
	return { patches: new Float32Array(0), grids: [], imagesPerSample: new Array<number>(samples).fill(0) };
}

/** Number of image indices reserved for each sample. */
const placesOfSample = 4096;

/** Numbers the images uniquely within a step's global batch. `first`: the position of the set's first sample in that batch. */
export function placeImages(images: ImageSet, first: number): ImageSet {
	const indices = images.imagesPerSample.flatMap((count, sample) =>
		Array.from({ length: count }, (_, image) => (first + sample) * placesOfSample + image),
	);
	return { ...images, indices };
}

/** Several sets, one after the other. */
export function joinImages(sets: readonly ImageSet[]): ImageSet {
	if (sets.length === 1) return sets[0]!;
	const patches = new Float32Array(sets.reduce((sum, set) => sum + set.patches.length, 0));
	let at = 0;
	for (const set of sets) {
		patches.set(set.patches, at);
		at += set.patches.length;
	}
	const known = sets.every(({ indices }) => indices !== undefined);
	return {
		patches,
		grids: sets.flatMap(({ grids }) => grids),
		imagesPerSample: sets.flatMap(({ imagesPerSample }) => imagesPerSample),
		...(known && { indices: sets.flatMap(({ indices }) => indices!) }),
	};
}

/**
 * Pixels [3, height, width] → patches [(height / p) · (width / p), 3p²], row-major over the grid, values of a patch
 * channel by channel. Height and width are multiples of p = patchSize.
 */
export function patchify(pixels: Float32Array, height: number, width: number, patchSize: number): Float32Array {
	const [rows, columns] = [height / patchSize, width / patchSize];
	if (!Number.isInteger(rows) || !Number.isInteger(columns) || pixels.length !== 3 * height * width) {
		throw new RangeError(
			`${pixels.length} values are not an image of ${height} × ${width} in patches of ${patchSize}.`,
		);
	}
	const patches = new Float32Array(pixels.length);
	let at = 0;
	for (let row = 0; row < rows; row++) {
		for (let column = 0; column < columns; column++) {
			for (let channel = 0; channel < 3; channel++) {
				for (let y = row * patchSize; y < (row + 1) * patchSize; y++) {
					const from = (channel * height + y) * width + column * patchSize;
					patches.set(pixels.subarray(from, from + patchSize), at);
					at += patchSize;
				}
			}
		}
	}
	return patches;
}

/** Patches of one frame, `width` values each, with every channel's values `frames` times. */
function withFrames(patches: Float32Array, { width, frames }: { readonly width: number; readonly frames: number }) {
	const channel = width / 3;
	const all = new Float32Array(patches.length * frames);
	for (let from = 0, to = 0; from < patches.length; from += channel) {
		for (let frame = 0; frame < frames; frame++, to += channel) all.set(patches.subarray(from, from + channel), to);
	}
	return all;
}

/** The patches of all images in the width that the tower takes: where it takes several frames, a picture is each of them. */
export function patchesOfTower({ patchWidth }: Pick<Tower, "patchWidth">, { patches, grids }: ImageSet): Float32Array {
	const values = grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0) * patchWidth;
	const frames = values / Math.max(1, patches.length);
	return frames > 1 ? withFrames(patches, { width: patchWidth / frames, frames }) : patches;
}

/** Copies the patches of all images to the device: [Σ rows · columns, patchWidth] in the tower's dtype. */
export function patchTensor(device: Device, tower: Pick<Tower, "dtype" | "patchWidth">, images: ImageSet): Tensor {
	const { dtype } = tower;
	const shape = [images.grids.reduce((sum, { rows, columns }) => sum + rows * columns, 0), tower.patchWidth];
	if (!device.counts) return Tensor.from(device, patchesOfTower(tower, images), shape, { dtype });
	// A counting device has no values, and the data set no pixels: only the size matters.
	const wide = Tensor.empty(device, shape, "f32", "data");
	if (dtype === "f32") return wide;
	using _wide = wide;
	return cast(wide, dtype, "data");
}
