/** Encoded samples → packs → the microbatch of a step: text for the language model, patches for the encoder. */
import type { ChannelStatistics } from "../../native/images.ts";
import type { Keyed, Sample } from "../energon/sample.ts";
import type { ImageSet } from "../images.ts";
import type { Microbatch } from "../microbatch.ts";
import type { DamagedSample } from "./batch-images.ts";
import { type EncodedText, ignored } from "./encoding.ts";

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
export type TextOfBatch = Pick<ImageTextBatch, "names" | "spans" | "text">;

/** A sample's name in messages, previews and the running hash: data set, shard, key. */
export function sampleName({ key, sources }: Pick<Sample, "key" | "sources">): string {
	return [...sources.map(({ datasetPath, shardName }) => `${datasetPath}/${shardName}`), key].join("/");
}

export interface BatchOptions {
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
