/** Data that drawn models train on, and options of their reading. */
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defaultPrepareOptions, prepare } from "../../src/data/energon/prepare/prepare.ts";
import { caption, type Member, png, tar } from "../data/fixtures.ts";
import type { Draw, Flags } from "./configuration-draw.ts";

const on = "true";
export const hasEncoder = (flags: Flags): boolean => flags["model-provider"] === "nemotron-moe-vlm";

const shards = 4;

/** A prepared set of four shards, its last one for validation. */
function writeSet(
	folder: string,
	members: (index: number) => readonly Member[],
	sampleType: string,
	fields: string,
): void {
	mkdirSync(folder);
	for (let shard = 0; shard < shards; shard++) {
		const samples = Array.from({ length: 24 }, (_, at) => members(24 * shard + at));
		writeFileSync(join(folder, `shard-${shard}.tar`), tar(samples.flat()));
	}
	prepare(folder, { ...defaultPrepareOptions, splitRatio: "3,1,0", sampleType, fieldMap: fields });
}

/** What the runs train on: text, sets of texts, and of pictures with captions. */
export function writeData(folder: string): void {
	const words = ["in", "the", "beginning", "was", "a", "word", "and", "it", "ended", "here"];
	let state = 1;
	const text = Array.from({ length: 3000 }, () => {
		state = (state * 48271) % 2147483647;
		return words[state % words.length];
	});
	writeFileSync(join(folder, "text.txt"), text.join(" "));
	const written = (i: number): Member => [`s${i}.txt`, caption(i)];
	const picture = (i: number): Member => [`s${i}.png`, png(8 * (1 + (i % 3)), 8 * (1 + (i % 2)), i)];
	writeSet(join(folder, "texts"), (i) => [written(i)], "TextSample", '{"text": "txt"}');
	writeSet(
		join(folder, "captions"),
		(i) => [picture(i), written(i)],
		"CaptioningSample",
		'{"image": "png", "caption": "txt"}',
	);
}

/** Options of Energon data that suit every sample. */
function drawReading(draw: Draw, pictures: boolean, packed: boolean): Flags {
	return {
		"num-workers": draw.one(["0", "1", "2"]),
		"data-end-id": "10",
		...(packed && {
			"packing-buffer-size": draw.one(["4", "8"]),
			"packing-method": draw.one(["carry-over", "greedy"]),
		}),
		...draw.sometimes(0.3, () => ({ "shuffle-buffer-size": "7" })),
		...draw.sometimes(0.2, () => ({ "data-seed-offset": "3" })),
		...draw.sometimes(0.2, () => ({ "max-samples-per-sequence": "5", "parallel-shard-iters": "2" })),
		...draw.sometimes(0.3, () => ({ "data-begin-id": "2", "data-pad-id": "1" })),
		...draw.sometimes(0.2, () => ({ "data-too-long": "skip" })),
		...draw.sometimes(pictures ? 0.2 : 0, () => ({ "conversation-template": "chatml", "caption-prompt": "?" })),
		...draw.sometimes(pictures ? 0.2 : 0, () => ({ "image-tag-type": draw.one(["internvl", "nvlm"]) })),
	};
}

function drawTiling(draw: Draw): Flags {
	return {
		"use-tiling": on,
		"max-num-tiles": draw.one(["2", "3"]),
		...draw.sometimes(0.5, () => ({ "use-thumbnail": on })),
		...draw.sometimes(0.5, () => ({ "use-tile-tags": on })),
	};
}

/** Bytes as tokens, and the data: text, or captioned pictures. */
export function trainable(draw: Draw, flags: Flags, folder: string): Flags {
	const { "vocab-size": _, ...rest } = flags;
	const pictures = hasEncoder(flags);
	const sampled = pictures || draw.chance(0.2);
	return {
		...rest,
		"vocab-size": draw.one(["257", "260", "288"]),
		...(pictures && { "image-token-id": "256" }),
		"data-path": join(folder, pictures ? "captions" : sampled ? "texts" : "text.txt"),
		...(sampled && drawReading(draw, pictures, draw.chance(0.5))),
		// Leaves room for text.
		...(pictures && { "seq-length": "64", "dynamic-resolution-max-patches": "16" }),
		...(pictures && draw.chance(0.15) && drawTiling(draw)),
		"train-iters": "4",
		"log-interval": "1",
	};
}
