/** How Energon data sets are read and turned into sequences (energon.md, vision.md §5). */
import { choice, defaulting, integer, list, off, optional, path, text } from "../field.ts";

export const energonKeys = {
	"data-split-part": defaulting(text, "train", "Part of the data set to train on."),
	"valid-data-split-part": defaulting(text, "val", "Part to evaluate on."),
	"num-workers": defaulting(integer(0), 2, "Data workers of a data lane. They decide on the order of the samples."),
	"data-seed-offset": defaulting(integer(0), 0, "Energon's seed_offset: another number gives another order."),
	"shuffle-buffer-size": optional(integer(1), "Samples of a worker's shuffle buffer; unset: none."),
	"packing-buffer-size": optional(
		integer(1),
		"Samples a worker looks at when it packs several into a sequence; unset: a sample is a sequence.",
	),
	"packing-method": defaulting(
		choice(["carry-over", "greedy"]),
		"carry-over",
		"What becomes of a buffer: the fuller half of its packs, the other samples carried over to the next buffer; or all packs at once, as in Megatron's examples.",
		{ megatron: "greedy" },
	),
	"max-samples-per-sequence": optional(
		integer(1),
		"Longest run of samples a worker reads in order before it may turn to another; unset: a shard's.",
	),
	"parallel-shard-iters": optional(
		integer(1),
		"Runs that a worker reads in turn; unset: 16 for training, 1 for evaluation.",
	),
	"data-routing": defaulting(
		choice(["lane", "routed"]),
		"lane",
		"How an encoder rank reads the lanes it serves: with a loader each, or all from one; the samples are the same.",
	),
	"data-memory": defaulting(integer(1), 1024, "Mebibytes of batches that may wait for a rank."),
	"data-prefetch": defaulting(integer(1), 2, "Microbatches a data worker runs ahead.", {
		aliases: ["prefetch-factor"],
	}),
	"data-threads": optional(integer(1), "Threads of a rank that run its data workers; unset: one a worker."),
	"data-on-error": defaulting(
		choice(["skip", "raise"]),
		"skip",
		"What a damaged sample does: it is left out, or it ends the run.",
	),
	"data-skip-budget": defaulting(integer(0), 1000, "Samples a rank may leave out before the run ends."),
	"data-skipped-file": optional(
		path,
		"File that lists samples left out, a line of JSON each; unset: skipped.jsonl in the folder of save.",
	),
	"data-cache-folder": optional(
		path,
		"Folder that copies of remote data lie below, in a folder of their own; unset: the user's cache folder.",
	),
	"data-cache-size": defaulting(integer(1), 16, "Gibibytes of remote data kept there."),
	"conversation-template": defaulting(
		choice(["plain", "pretraining", "chatml"]),
		"plain",
		"What is written around the turns: nothing, the speaker's name, or <|im_start|>role … <|im_end|>.",
	),
	"loss-roles": optional(
		list(choice(["system", "user", "assistant"])),
		"Whose turns count in the loss; unset: everyone's, with chatml the assistant's.",
	),
	"image-tag-type": defaulting(
		choice(["none", "internvl", "nvlm"]),
		"none",
		"Text around an image: none, <img>…</img> or <Image>…</Image>.",
		{ megatron: "unset" },
	),
	"caption-prompt": optional(text, "What the user asks where the data have an image and its caption alone."),
	"ocr-prompt": optional(text, "What the user asks where the data have an image and the text on it."),
	"classification-prompt": optional(text, "What the user asks where the data have an image and its label."),
	"data-begin-id": optional(integer(0), "Token put before every sample."),
	"data-end-id": optional(integer(0), "Token put after every sample."),
	"data-pad-id": defaulting(integer(0), 0, "Token that fills a sequence up to seq-length; it never counts."),
	"dynamic-resolution-min-patches": defaulting(
		integer(0),
		4,
		"Fewest patches of an image; smaller ones are enlarged.",
		{
			megatron: "0",
		},
	),
	"dynamic-resolution-max-patches": defaulting(integer(0), 0, "Most patches of an image; 0: what the sequence holds."),
	"dynamic-resolution-min-side": defaulting(integer(0), 0, "Pixels the shorter side is enlarged to; 0: none."),
	"use-tiling": off("Cut images into tiles of img-h × img-h."),
	"max-num-tiles": defaulting(integer(1), 12, "Most tiles of an image.", { megatron: "1" }),
	"use-thumbnail": off("The whole image as one more tile, where there are several."),
} as const;
