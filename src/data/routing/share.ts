/** The part of a lane's images that one of several encoder ranks takes (docs/spec/runtime.md §8). */
import type { ImageSet } from "../images.ts";

/** This rank's place among the encoder ranks that share a lane. */
export interface Share {
	readonly index: number;
	readonly count: number;
}

export const wholeShare: Share = { index: 0, count: 1 };

/**
 * Images of the contiguous run of samples that encoder rank `index` of `count` encodes. `width`: values of a patch. The
 * number of samples is a multiple of `count`.
 */
export function shareOfImages(images: ImageSet, { index, count }: Share, width: number): ImageSet {
	if (count === 1) return images;
	const { patches, grids, imagesPerSample, indices } = images;
	const per = imagesPerSample.length / count;
	if (!Number.isInteger(per)) {
		throw new RangeError(`${imagesPerSample.length} samples cannot be dealt out to ${count} encoder ranks.`);
	}
	const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);
	const values = (part: ImageSet["grids"]) => sum(part.map(({ rows, columns }) => rows * columns * width));
	const [first, last] = [index * per, (index + 1) * per];
	const firstImage = sum(imagesPerSample.slice(0, first));
	const endImage = firstImage + sum(imagesPerSample.slice(first, last));
	const begin = values(grids.slice(0, firstImage));
	const own = grids.slice(firstImage, endImage);
	return {
		patches: patches.slice(begin, begin + values(own)),
		grids: own,
		imagesPerSample: imagesPerSample.slice(first, last),
		...(indices ? { indices: indices.slice(firstImage, endImage) } : {}),
	};
}
