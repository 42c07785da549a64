/**
 * The images of a microbatch as patches. Only those that this rank's encoder sees are decoded, so other ranks cannot know
 * that one is damaged: its sample keeps its place with black images, and the ranks agree on it before they train
 * (routing/damaged-samples.ts).
 */
import type { PatchGrid } from "../../models/tower.ts";
import { UserError } from "../../system/errors.ts";
import type { ImageSet } from "../images.ts";
import type { Share } from "../routing/image-share.ts";
import { type EncodedSample, joined, type Pack, sampleName } from "./batch.ts";
import { patchGrids } from "./image-plan.ts";

/** A sample with an image that cannot be decoded. */
export interface DamagedSample {
	/** Its number among those of the microbatch. */
	readonly sample: number;
	/** In one sentence, with the sample's name. */
	readonly reason: string;
	readonly sources: readonly { readonly dataset: string; readonly shard: string; readonly key: string }[];
}

/** Patches of every tile of an image; throws a UserError for a file that is damaged. */
export type Decode = (image: EncodedSample["images"][number]) => Float32Array[];

/** Where the images of packs are, without their pixels. */
export function placesOfImages(packs: readonly Pack[], patchSize: number): ImageSet {
	const grids = packs.map(({ samples }) => samples.flatMap((sample) => gridsOf(sample, patchSize)));
	return { patches: new Float32Array(0), grids: grids.flat(), imagesPerSample: grids.map(({ length }) => length) };
}

/** The images of the packs that encoder rank `index` of `count` encodes. The number of packs is a multiple of `count`. */
export function decodeImages(
	packs: readonly Pack[],
	{ index, count }: Share,
	patchSize: number,
	decode: Decode,
): { readonly images: ImageSet; readonly damaged: readonly DamagedSample[] } {
	const per = packs.length / count;
	if (!Number.isInteger(per)) {
		throw new RangeError(`${packs.length} samples cannot be dealt out to ${count} encoder ranks.`);
	}
	const [begin, end] = [index * per, (index + 1) * per];
	const own = packs.slice(begin, end);
	let number = packs.slice(0, begin).reduce((sum, { samples }) => sum + samples.length, 0);
	const damaged: DamagedSample[] = [];
	const patches: Float32Array[] = [];
	for (const sample of own.flatMap(({ samples }) => samples)) {
		const decoded = patchesOf(sample, patchSize, decode);
		patches.push(...decoded.patches);
		if (decoded.reason !== null) damaged.push(described(sample, number, decoded.reason));
		number++;
	}
	return { images: { ...placesOfImages(own, patchSize), patches: joined(patches) }, damaged };
}

function gridsOf({ images }: EncodedSample, patchSize: number): PatchGrid[] {
	return images.flatMap(({ plan }) => patchGrids(plan, patchSize));
}

/** Patches of a sample's images, all zero where one of them is damaged. */
function patchesOf(
	sample: EncodedSample,
	patchSize: number,
	decode: Decode,
): { readonly patches: readonly Float32Array[]; readonly reason: string | null } {
	try {
		return { patches: sample.images.flatMap(decode), reason: null };
	} catch (error) {
		if (!(error instanceof UserError)) throw error;
		const values = 3 * patchSize * patchSize;
		const patches = gridsOf(sample, patchSize).map(({ rows, columns }) => new Float32Array(rows * columns * values));
		return { patches, reason: error.message };
	}
}

function described(sample: EncodedSample, number: number, reason: string): DamagedSample {
	const sources = sample.sources.map(({ datasetPath, shardName }) => ({
		...{ dataset: datasetPath, shard: shardName, key: sample.key },
	}));
	return { sample: number, reason: `Sample ${sampleName(sample)}: ${reason.replace(/\.$/, "")}.`, sources };
}
