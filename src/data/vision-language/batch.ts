/** Encoded samples → packs → the microbatch of a step: text for the language model, patches for the encoder. */

import type { PatchGrid } from "../../models/tower.ts";
import type { ChannelStatistics } from "../../native/images.ts";
import { UserError } from "../../system/errors.ts";
import type { Keyed, Sample } from "../energon/sample.ts";
import type { ImageSet } from "../images.ts";
import type { Microbatch } from "../microbatch.ts";
import type { Share } from "../routing/image-share.ts";
import { type EncodedText, ignored } from "./encoding.ts";
import { patchGrids } from "./image-plan.ts";

/*
 * The images of a microbatch as patches. Only those that this rank's encoder sees are decoded, so other ranks cannot know that
 * one is damaged: its sample keeps its place with black images, and the ranks agree on it before they train
 * (routing/agreement.ts).
 */

/** A sample with an image that cannot be decoded. */
interface DamagedSample {
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

/** Grids of the images that the encoder sees of a sample. */
export function gridsOf({ images }: EncodedSample, patchSize: number): PatchGrid[] {
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

/** Where a sample is from. */
type Origin = Pick<Sample, "restoreKey" | "key" | "sources">;

/** A sample whose images wait as files, each with the statistics of its data set. */
export interface EncodedSample extends Origin, Omit<EncodedText, "images"> {
	readonly images: readonly (EncodedText["images"][number] & { readonly statistics: ChannelStatistics })[];
}

/** Samples that share a sequence. */
export interface Pack extends Keyed {
	readonly samples: readonly EncodedSample[];
}

export interface ImageTextBatch extends Keyed {
	/** Names of its samples, in order. */
	readonly names: readonly string[];
	/** Tokens [begin, end) of its samples, in order. */
	readonly spans: readonly (readonly [begin: number, end: number])[];
	/** Its `samples` are the packs. */
	readonly text: Microbatch;
	readonly images: ImageSet;
	/** Images of all its samples, whether they are handed on or not. */
	readonly imageCount: number;
	/** Samples whose images this rank could not decode. */
	readonly damaged: readonly DamagedSample[];
}

/** The fields of a batch that follow from its samples' text alone. */
type TextOfBatch = Pick<ImageTextBatch, "names" | "spans" | "text">;

/** A sample's name in messages, previews and the running hash: data set, shard, key. */
export function sampleName({ key, sources }: Pick<Sample, "key" | "sources">): string {
	return [...sources.map(({ datasetPath, shardName }) => `${datasetPath}/${shardName}`), key].join("/");
}

interface BatchOptions {
	/** Tokens of a pack; shorter ones get a sequence of padding at the end. null = no padding. */
	readonly padTo: number | null;
	readonly padId: number;
}

/** Packs one after the other, the samples of each one after the other. */
export function buildBatch(packs: readonly Pack[], { padTo, padId }: BatchOptions): TextOfBatch {
	const lengths: number[] = [];
	let padding = 0;
	const packLengths = packs.map(({ samples }) => {
		const own = samples.map(({ ids }) => ids.length);
		const tokens = own.reduce((sum, length) => sum + length, 0);
		const missing = Math.max(0, (padTo ?? 0) - tokens);
		padding += missing;
		lengths.push(...own, ...(missing > 0 ? [missing] : []));
		return tokens + missing;
	});
	const total = packLengths.reduce((sum, length) => sum + length, 0);
	const ids = new Int32Array(total).fill(padId);
	const labels = new Int32Array(total).fill(ignored);
	const spans: [number, number][] = [];
	let begin = 0;
	for (const [index, { samples }] of packs.entries()) {
		let at = begin;
		for (const sample of samples) {
			ids.set(sample.ids, at);
			labels.set(sample.labels, at);
			spans.push([at, at + sample.ids.length]);
			at += sample.ids.length;
		}
		begin += packLengths[index]!;
	}
	const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
	return {
		names: packs.flatMap((pack) => pack.samples.map(sampleName)),
		spans,
		text: { ids, labels, lossMask, lengths, samples: packLengths, padding },
	};
}

/** Arrays one after the other. */
export function joined(parts: readonly Float32Array[]): Float32Array {
	const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
	let at = 0;
	for (const part of parts) {
		all.set(part, at);
		at += part.length;
	}
	return all;
}
