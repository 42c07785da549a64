/** How Energon data sets are read and turned into sequences (docs/spec/energon.md, docs/spec/vision.md §5). */
import {
	choice,
	defaulting,
	derived,
	imageSize,
	integer,
	list,
	off,
	optional,
	path,
	perChannel,
	text,
} from "../field.ts";

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
		choice(["carry-over", "equal-work", "greedy"]),
		"carry-over",
		"carry-over: the fuller half of a buffer's packs become sequences, and the other samples go to the next buffer; equal-work: likewise, of packs with about the same work for the encoder, so that steps on pictures of many sizes take the same time; greedy: all packs do, as in Megatron's examples.",
		{ megatron: "greedy" },
	),
	"packing-max-patches": optional(
		integer(1),
		"Most patches of a sequence's images: packs hold no more, a sample's images become smaller or are left out as with seq-length, and mimo plan counts memory for them; unset: as many as seq-length holds.",
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
		"Loaders of an encoder rank: lane, a loader for each data lane that it serves; routed, a loader for all; the samples are the same.",
	),
	"data-memory": defaulting(
		integer(1),
		1024,
		"Mebibytes of batches that may wait for a rank, and as many of images that it decodes at the same time.",
	),
	"data-prefetch": defaulting(integer(1), 2, "Microbatches a data worker runs ahead.", {
		aliases: ["prefetch-factor"],
	}),
	"data-threads": optional(integer(1), "Threads of a rank that run its data workers; unset: one a worker."),
	"data-on-error": defaulting(
		choice(["skip", "raise"]),
		"skip",
		"A damaged sample: skip leaves it out; raise ends the run.",
	),
	"data-skip-budget": defaulting(integer(0), 1000, "Samples a rank may leave out before the run ends."),
	"data-skipped-file": optional(
		path,
		"File that lists samples left out, a line of JSON each; unset: skipped.jsonl in the folder of save.",
	),
	"data-cache-folder": optional(path, "Parent of the folder of copies of remote data; unset: the user's cache folder."),
	"data-cache-size": defaulting(integer(1), 16, "Gibibytes of remote data kept in data-cache-folder."),
	"data-timeout": defaulting(
		integer(1),
		60,
		"Seconds after which a read of training data counts as stuck and ends the run: a piece of a remote file, attempts included, or a sample, index or file of a local disk.",
	),
	"data-private-redirects": off("Follow a data server's redirects to other hosts of this machine's own network."),
	"conversation-template": derived(
		choice(["plain", "pretraining", "chatml", "jinja"]),
		"jinja with chat-template, or where tokenizer's folder has a template; else plain",
		"Text around the turns: plain, none; pretraining, the speaker's name; chatml, <|im_start|>role … <|im_end|>; jinja, that of a Jinja chat template.",
	),
	"chat-template": optional(
		path,
		"A Jinja chat template: its file, or a Hugging Face folder with one; unset: that of tokenizer's folder, if it has one.",
	),
	"chat-template-kwargs": optional(text, "Further variables of the chat template, as a JSON object."),
	"chat-template-date": optional(text, "Today's date for the chat template, such as 2026-01-31; unset: no date."),
	"data-special-tokens": optional(
		list(text),
		"Special tokens that a sample's text may contain, such as <think>; all others are read as plain text.",
	),
	"loss-roles": optional(
		list(choice(["system", "user", "assistant"])),
		"Roles whose turns count in the loss; unset: all, with chatml and jinja assistant.",
	),
	"data-too-long": defaulting(
		choice(["truncate", "skip"]),
		"truncate",
		"A sample longer than seq-length: truncate cuts its end off; skip leaves it out and counts it.",
	),
	"image-tag-type": defaulting(
		choice(["none", "internvl", "nvlm"]),
		"none",
		"Text around an image: none, <img>…</img> or <Image>…</Image>.",
		{ megatron: "unset" },
	),
	"image-decoding": optional(
		choice(["transformers", "energon"]),
		"How image files become RGB: transformers, upright by EXIF, on white where they are transparent, palettes as colours before resizing; energon, as Energon's decoder leaves them; unset: energon for Energon data, transformers for sets that mimo data import made and for other image files.",
	),
	"caption-prompt": optional(text, "User's prompt for samples of an image and its caption alone."),
	"ocr-prompt": optional(text, "User's prompt for samples of an image and the text on it."),
	"classification-prompt": optional(text, "User's prompt for samples of an image and its label."),
	"data-begin-id": optional(integer(0), "Token put before every sample."),
	"data-end-id": optional(integer(0), "Token put after every sample."),
	"data-pad-id": defaulting(integer(0), 0, "Token that fills a sequence up to seq-length; it never counts.", {
		aliases: ["pad-token-id"],
	}),
	"dynamic-resolution-min-patches": defaulting(
		integer(0),
		4,
		"Fewest patches of an image; smaller ones are enlarged.",
		{
			megatron: "0",
		},
	),
	"dynamic-resolution-max-patches": defaulting(integer(0), 0, "Most patches of an image; 0: what the sequence holds."),
	"dynamic-resolution-min-side": defaulting(
		integer(0),
		0,
		"Pixels that the shorter side is enlarged to, before max-pixels where it is given; 0: none.",
	),
	"max-pixels": optional(
		integer(1),
		"Most pixels of an image: with dynamic-resolution both sides become the nearest multiples of a row's block of patches, and an image of more or fewer pixels is resized in proportion, as Qwen's processors do; unset: limits in patches.",
	),
	"min-pixels": defaulting(integer(1), 3136, "Fewest pixels of an image, with max-pixels."),
	"image-resampling": defaulting(
		choice(["pillow", "torchvision"]),
		"pillow",
		"The bicubic filter's arithmetic: pillow's, or torchvision's on 8 bits, as transformers' processors of Qwen-VL, InternVL, SigLIP and LLaVA-OneVision have it.",
	),
	"image-mean": defaulting(
		perChannel(0, 1),
		[0.48145466, 0.4578275, 0.40821073],
		"Mean of red, green and blue in images, from 0 to 1; the default is CLIP's, as of RADIO.",
	),
	"image-std": defaulting(
		perChannel(0.001, 1),
		[0.26862954, 0.26130258, 0.27577711],
		"Standard deviation of red, green and blue in images; the default is CLIP's, as of RADIO.",
	),
	"image-grid-pinpoints": optional(
		list(imageSize),
		"Sizes in pixels, such as 384x768 (height by width), of which a sample's only image takes the one that keeps most of it, and becomes tiles of img-h × img-w; images of samples with several become squares. As in LLaVA-OneVision, needs vision-image-newline; unset: images are cut as use-tiling says.",
	),
	"max-anyres-tiles": defaulting(
		integer(1),
		9,
		"Tiles whose rows an image may have with image-grid-pinpoints; rows of larger ones are resized (vision_aspect_ratio anyres_max_9).",
	),
	"use-tiling": off("Cut images into tiles of img-h × img-h."),
	"min-num-tiles": defaulting(integer(1), 1, "Fewest tiles of an image."),
	"max-num-tiles": defaulting(integer(1), 12, "Most tiles of an image.", {
		megatron: "1",
		aliases: ["num-image-tiles"],
	}),
	"use-area-weighted-aspect-ratio": off("Choose tiles by proportions and number of pixels, not by proportions alone."),
	"use-tile-tags": off("Write <tile_1>, <tile_2>, … and <tile_global_thumbnail> before the tokens of the tiles."),
	"use-thumbnail": off("The whole image as a further tile, where it has several."),
} as const;
