/** Vision encoder, projector, freezing (docs/spec/runtime.md §8, §9, docs/spec/vision.md). */
import {
	boolean,
	choice,
	defaulting,
	derived,
	integer,
	list,
	number,
	off,
	optional,
	positiveNumber,
} from "../field.ts";

export const visionKeys = {
	"image-token-id": defaulting(integer(0), 511, "Placeholder id of an image token.", { model: false }),
	"image-seq-length": optional(integer(1), "Image tokens of a sample; unset: from the image's geometry.", {
		model: false,
	}),
	"vision-num-layers": defaulting(integer(1), 32, "Layers of the RADIO tower.", { megatron: "32, fixed in code" }),
	"vision-hidden-size": defaulting(integer(1), 1280, "Width of the tower.", { megatron: "1280, fixed in code" }),
	"vision-num-attention-heads": defaulting(integer(1), 16, "Attention heads of the tower.", {
		megatron: "16, fixed in code",
	}),
	"vision-kv-channels": derived(
		integer(1),
		"vision-hidden-size / vision-num-attention-heads",
		"Width of one attention head of the tower.",
		{ megatron: "80, fixed in code" },
	),
	"vision-ffn-hidden-size": derived(integer(1), "4 × vision-hidden-size", "Width of the tower's MLP.", {
		megatron: "5120, fixed in code",
	}),
	"vision-max-img-h": defaulting(integer(1), 2048, "Height in pixels that the table of positions covers.", {
		megatron: "2048, fixed in code",
	}),
	"vision-max-img-w": defaulting(integer(1), 2048, "Width in pixels that the table of positions covers.", {
		megatron: "2048, fixed in code",
	}),
	"vision-position-mode": defaulting(
		choice(["cpe", "direct", "window", "bicubic", "antialias", "aligned", "none"]),
		"cpe",
		"Fit of the table of positions to an image: cpe, to the square of its longer side; direct, to its grid; window, none (its top left corner); bicubic and antialias, to its grid by these filters; aligned, to its grid with the corners of both at one place. none: there is no table.",
		{ megatron: "cpe, fixed in code" },
	),
	"vision-position-crop": defaulting(
		boolean,
		true,
		"Random windows of the table of positions while the tower trains; without it, and in evaluation, the window that fits.",
		{ model: false, megatron: "true, fixed in code" },
	),
	"vision-final-layernorm": defaulting(boolean, true, "A norm after the tower's last layer.", {
		megatron: "true in MIMO, false in Megatron-Bridge",
	}),
	"vision-activation": defaulting(
		choice(["gelu-tanh", "gelu", "swiglu"]),
		"gelu-tanh",
		"Activation of the tower: GELU by tanh as in Megatron, exact as in transformers' RADIO, or SiLU of a gate as in Qwen2.5-VL.",
		{ megatron: "gelu-tanh, fixed in code" },
	),
	"vision-normalization": defaulting(
		choice(["LayerNorm", "RMSNorm"]),
		"LayerNorm",
		"The tower's norms; RMSNorm has no biases.",
	),
	"vision-window-size": optional(
		integer(1),
		"Side in pixels of the windows of an image in which the tower's layers attend, as in Qwen2.5-VL; unset: they attend over images.",
	),
	"fullatt-block-indexes": optional(
		list(integer(0)),
		"Layers of the tower, from 0, that attend over images although there is a vision-window-size; unset: none.",
	),
	"vision-norm-epsilon": defaulting(number(0), 1e-6, "Epsilon of the tower's norms.", {
		megatron: "1e-6, fixed in code",
	}),
	"vision-patch-bias": off("A bias of the embedding of patches, as most towers but RADIO have."),
	"vision-patch-norm": off("A norm between the embedding of patches and their positions, as in GLM-4.5V."),
	"vision-add-bias-linear": defaulting(boolean, true, "Biases of the tower's other projections.", {
		megatron: "true, fixed in code",
	}),
	"vision-add-qkv-bias": defaulting(boolean, true, "Biases of the tower's queries, keys and values.", {
		megatron: "true, fixed in code",
	}),
	"vision-qk-norm": off("An RMSNorm of the tower's queries and keys over all heads together, as in InternViT-6B."),
	"vision-layer-scale": optional(
		number(0),
		"Initial value of a trained factor for every column that each half of a layer adds, as in InternViT; unset: none.",
	),
	"vision-class-token-positions": off("Learned positions of class tokens too."),
	"vision-temporal-patch-size": defaulting(
		integer(1),
		1,
		"Frames of a patch, which a picture repeats; more than 1 in Qwen's towers, whose patches are convolved in 3-D.",
	),
	"vision-rotary-base": optional(
		positiveNumber,
		"Base of rotary embeddings by the row and column of a patch, beside the table of positions or in its place; unset: none.",
	),
	"deepstack-visual-indexes": optional(
		list(integer(0)),
		"Layers of the tower, from 0, whose rows are added behind the first MLPs or experts of the language model too; unset: none.",
	),
	"vision-feature-layers": optional(
		list(integer(0)),
		"Layers of the tower, from 0, whose outputs stand before the last one's in the rows that the projector reads, as where LLaVA's vision_feature_layer lists several; unset: none.",
	),
	"vision-image-newline": off(
		"A learned row behind every line of a picture's tiles, and behind a picture of one tile, as in LLaVA-OneVision.",
	),
	"class-token-len": defaulting(integer(0), 8, "Class tokens of the encoder."),
	"pixel-shuffle": off("Join 2 × 2 patches of the encoder's output into one token."),
	"disable-vision-class-token": off("Drop class tokens after the encoder."),
	"dynamic-resolution": off("Images keep their size and are packed.", { model: false }),
	"img-h": defaulting(integer(1), 224, "Image height in pixels.", { model: false }),
	"img-w": defaulting(integer(1), 224, "Image width in pixels.", { model: false }),
	"patch-dim": defaulting(integer(1), 16, "Side of a patch in pixels."),
	"vision-projection-type": defaulting(
		choice(["affine", "mlp"]),
		"affine",
		"Projector from encoder to language width.",
	),
	"vision-projection-norm": off("A norm before an mlp projector, as published models have it.", {
		model: "MLP projector",
	}),
	"vision-projection-normalization": defaulting(
		choice(["RMSNorm", "LayerNorm"]),
		"RMSNorm",
		"The norm of vision-projection-norm.",
		{ model: "MLP projector" },
	),
	"vision-projection-stem": off(
		"Two linear layers, a LayerNorm and GELU before an mlp projector, as in GLM-4.5V's merger.",
		{ model: "MLP projector" },
	),
	"vision-projection-activation": defaulting(
		choice(["squared-relu", "gelu", "swiglu"]),
		"squared-relu",
		"Activation of an mlp projector.",
		{ model: "MLP projector" },
	),
	"vision-projection-bias": off("Biases of an mlp projector.", { model: "MLP projector" }),
	"vision-projection-ffn-hidden-size": derived(
		integer(1),
		"4 × width of the projector's input",
		"Width of an mlp projector's hidden layer.",
		{ model: "MLP projector", megatron: "4 × width of its input, fixed in code" },
	),
	"freeze-lm": off("Do not train the language model.", { model: false }),
	"freeze-vit": off("Do not train the encoder.", { model: false }),
	"freeze-projection": off("Do not train the projector.", { model: false }),
	"encoder-balance": derived(
		choice(["number", "cost"]),
		"cost, but number with mimo-encoder-prefetch or encoder-pp above 1",
		"number: the encoder's data-parallel ranks get equally many samples; cost: images with about equally many operations.",
		{ model: false },
	),
	"encoder-cost-steps": defaulting(
		integer(0),
		0,
		"With encoder-balance cost: steps, from the second, in which the time of images is measured; from then on an image costs what a·p² + b·p + c of its patches, fitted to these times, says. 0: its operations.",
		{ model: false },
	),
	"encoder-grad-participation": defaulting(
		choice(["exact", "corrected"]),
		"exact",
		"exact: gradient of the mean loss; corrected: the encoder's gradient times ranks / ranks with images.",
		{ model: false },
	),
	"mimo-encoder-prefetch": off("Encode images of a frozen encoder ahead of time.", { model: false }),
	"mimo-encoder-prefetch-depth": defaulting(integer(1), 2, "Encoded batches kept ready.", { model: false }),
	"mimo-encoder-prefetch-debug": off("Print how long encoding and waiting took.", { model: false }),
} as const;
