/** Options of how data are read, and the data that suit a model. */
import { join } from "node:path";
import { type Draw, type Flags, on } from "../draw.ts";
import type { Emphasis } from "../model/model.ts";
import { hasEncoder } from "../model/vision.ts";
import { setsOf } from "./sets.ts";

export const readsEnergon = (flags: Flags): boolean => !flags["data-path"]!.endsWith(".txt");

/** Options of Energon data that suit every sample. */
function drawReading(draw: Draw, pictures: boolean): Flags {
	return {
		"num-workers": draw.one(["0", "1", "2", "4"]),
		"data-end-id": "10",
		...draw.sometimes(0.5, () => ({
			"packing-buffer-size": draw.one(["4", "8"]),
			"packing-method": draw.one(["carry-over", "equal-work", "greedy"]),
		})),
		...draw.sometimes(0.3, () => ({ "shuffle-buffer-size": "7" })),
		...draw.sometimes(0.2, () => ({ "data-seed-offset": "3" })),
		...draw.sometimes(0.2, () => ({ "max-samples-per-sequence": "5", "parallel-shard-iters": "2" })),
		...draw.sometimes(0.3, () => ({ "data-begin-id": "2", "data-pad-id": "1" })),
		...draw.sometimes(0.2, () => ({ "data-too-long": "skip" })),
		...(pictures && drawConversations(draw)),
		...draw.sometimes(pictures ? 0.2 : 0, () => ({ "image-tag-type": draw.one(["internvl", "nvlm"]) })),
	};
}

function drawConversations(draw: Draw): Flags {
	return draw.one<Flags>([
		{},
		{},
		{ "conversation-template": "pretraining" },
		{ "conversation-template": "chatml", "caption-prompt": "?" },
		{ "conversation-template": "chatml", "loss-roles": "user,assistant" },
		{ "conversation-template": "jinja", "chat-template": "chat.jinja", "caption-prompt": "?" },
	]);
}

function drawTiling(draw: Draw): Flags {
	return {
		"use-tiling": on,
		"max-num-tiles": draw.one(["2", "3"]),
		...draw.sometimes(0.5, () => ({ "use-thumbnail": on })),
		...draw.sometimes(0.5, () => ({ "use-tile-tags": on })),
		...draw.sometimes(0.3, () => ({ "use-area-weighted-aspect-ratio": on })),
	};
}

/** Tiles are square and need room; with dynamic resolution there are none. */
function tiled(draw: Draw, flags: Flags): Flags {
	const { "dynamic-resolution": _, ...fixed } = flags;
	return { ...fixed, "img-w": fixed["img-h"]!, "seq-length": draw.one(["64", "96", "128"]), ...drawTiling(draw) };
}

/** Bytes as tokens, and the data: text, or pictures with words. */
export function trainable(draw: Draw, model: Flags, emphasis: Emphasis, folder: string): Flags {
	const { "vocab-size": _, ...rest } = model;
	const pictures = hasEncoder(model);
	const sampled = pictures || draw.chance(emphasis.energon);
	const set = draw.one(pictures ? setsOf.pictures : setsOf.text);
	const reading = sampled ? drawReading(draw, pictures) : {};
	const flags: Flags = {
		...rest,
		"vocab-size": draw.one(["257", "260", "288"]),
		"data-path": join(folder, sampled ? set : "text.txt"),
		...reading,
		...("chat-template" in reading && { "chat-template": join(folder, reading["chat-template"]!) }),
		"train-iters": "4",
		"log-interval": "1",
	};
	if (!pictures) return sampled ? { ...flags, "seq-length": draw.one(["32", "48", "64"]) } : flags;
	const shown: Flags = {
		...flags,
		"image-token-id": "256",
		// Leaves room for text.
		"seq-length": set === "captions" ? "64" : draw.one(["64", "96"]),
		"dynamic-resolution-max-patches": "16",
	};
	return draw.chance(emphasis.tiling) ? tiled(draw, shown) : shown;
}
