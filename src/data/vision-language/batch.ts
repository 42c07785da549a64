/** Encoded samples → packs → the microbatch of a step: text for the language model, patches for the encoder. */
import type { PatchGrid } from "../../models/radio/config.ts";
import type { Keyed, Sample } from "../energon/sample.ts";
import type { ImageSet } from "../images.ts";
import type { Microbatch } from "../microbatch.ts";
import { type EncodedText, ignored } from "./encoding.ts";

/** Where a sample is from. */
type Origin = Pick<Sample, "restoreKey" | "key" | "sources">;

/** A sample whose images wait as files. */
export interface EncodedSample extends Origin, EncodedText {}

/** A sample whose images are patches. */
export interface ReadySample extends Origin {
	readonly ids: Int32Array;
	readonly labels: Int32Array;
	/** Of every image (tile) the encoder sees. */
	readonly patches: readonly Float32Array[];
	readonly grids: readonly PatchGrid[];
}

/** Samples that share a sequence. */
export interface Pack extends Keyed {
	readonly samples: readonly ReadySample[];
}

export interface ImageTextBatch extends Keyed {
	/** Names of its samples, in order. */
	readonly names: readonly string[];
	readonly text: Microbatch;
	readonly images: ImageSet;
}

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
export function buildBatch(packs: readonly Pack[], { padTo, padId }: BatchOptions): Omit<ImageTextBatch, "restoreKey"> {
	const lengths: number[] = [];
	const imagesPerSample: number[] = [];
	const padding: { readonly begin: number; readonly end: number }[] = [];
	let total = 0;
	for (const { samples } of packs) {
		const begin = total;
		for (const { ids, grids } of samples) {
			lengths.push(ids.length);
			imagesPerSample.push(grids.length);
			total += ids.length;
		}
		const missing = (padTo ?? 0) - (total - begin);
		if (missing <= 0) continue;
		lengths.push(missing);
		imagesPerSample.push(0);
		padding.push({ begin: total, end: total + missing });
		total += missing;
	}
	const samples = packs.flatMap((pack) => pack.samples);
	const ids = new Int32Array(total);
	const labels = new Int32Array(total).fill(ignored);
	for (const { begin, end } of padding) ids.fill(padId, begin, end);
	let at = 0;
	let nextPadding = 0;
	for (const sample of samples) {
		if (at === padding[nextPadding]?.begin) at = padding[nextPadding++]!.end;
		ids.set(sample.ids, at);
		labels.set(sample.labels, at);
		at += sample.ids.length;
	}
	const lossMask = Float32Array.from(labels, (label) => (label === ignored ? 0 : 1));
	const patches = joined(samples.flatMap((sample) => sample.patches));
	return {
		names: samples.map(sampleName),
		text: { ids, labels, lossMask, lengths },
		images: { patches, grids: samples.flatMap(({ grids }) => grids), imagesPerSample },
	};
}

function joined(parts: readonly Float32Array[]): Float32Array {
	const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
	let at = 0;
	for (const part of parts) {
		all.set(part, at);
		at += part.length;
	}
	return all;
}
