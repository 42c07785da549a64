/**
 * The part of a lane's images that one of several encoder lanes takes (docs/spec/runtime.md §8): an equal run of every
 * microbatch's samples, or whole microbatches in turn where the samples do not divide.
 */
import type { ImageSet } from "../images.ts";

/** This encoder lane's place among those that share a lane of the language model. */
export interface Share {
	readonly index: number;
	readonly count: number;
}

export const wholeShare: Share = { index: 0, count: 1 };

/**
 * The part that a share takes of every microbatch of `samples` samples, which the data threads decode; the whole of
 * them where shares are turns, because a data thread does not know the place of a microbatch in its step.
 */
export function partOfEvery(share: Share, samples: number): Share {
	return samples % share.count === 0 ? share : wholeShare;
}

/** The turns that a share takes where microbatches of `samples` samples are not divided; otherwise each is its turn. */
export function turnOf(share: Share, samples: number): Share {
	return samples % share.count === 0 ? wholeShare : share;
}

/** Whether microbatch `microbatch` of a step, from 0, is the turn of an encoder lane. */
export function isTurn({ index, count }: Share, microbatch: number): boolean {
	return microbatch % count === index;
}

/** Samples of microbatch `microbatch` of a step, from 0, that each of `count` encoder lanes takes, in order. */
export function samplesOfShares(samples: number, count: number, microbatch: number): number[] {
	const even = samples % count === 0;
	const ofTurn = (index: number) => (isTurn({ index, count }, microbatch) ? samples : 0);
	return Array.from({ length: count }, (_, index) => (even ? samples / count : ofTurn(index)));
}

/** The part of `samples`, the samples of a microbatch, that a share takes. */
export function shareOf<S>(samples: readonly S[], { index, count }: Share, microbatch: number): S[] {
	const runs = samplesOfShares(samples.length, count, microbatch);
	const first = runs.slice(0, index).reduce((total, run) => total + run, 0);
	return samples.slice(first, first + runs[index]!);
}

/** Images of a share's samples. */
export function shareOfImages(images: ImageSet, share: Share, microbatch: number): ImageSet {
	if (share.count === 1) return images;
	const { patches, grids, imagesPerSample, indices } = images;
	const own = shareOf([...imagesPerSample.keys()], share, microbatch);
	const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);
	const count = (part: ImageSet["grids"]) => sum(part.map(({ rows, columns }) => rows * columns));
	// A device that counts has no values.
	const width = patches.length === 0 ? 0 : patches.length / count(grids);
	const values = (part: ImageSet["grids"]) => count(part) * width;
	const [first, last] = own.length === 0 ? [0, 0] : [own[0]!, own.at(-1)! + 1];
	const firstImage = sum(imagesPerSample.slice(0, first));
	const endImage = firstImage + sum(imagesPerSample.slice(first, last));
	const begin = values(grids.slice(0, firstImage));
	const ownGrids = grids.slice(firstImage, endImage);
	return {
		patches: patches.slice(begin, begin + values(ownGrids)),
		grids: ownGrids,
		imagesPerSample: imagesPerSample.slice(first, last),
		...(indices ? { indices: indices.slice(firstImage, endImage) } : {}),
	};
}
