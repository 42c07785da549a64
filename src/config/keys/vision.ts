/** Vision encoder, projector, freezing (runtime.md §8, §9, vision.md). */
import { choice, defaulting, integer, off, optional } from "../field.ts";

export const visionKeys = {
	"image-token-id": defaulting(integer(0), 511, "Placeholder id of an image token."),
	"image-seq-length": optional(integer(1), "Image tokens of a sample; unset: from the image's geometry."),
	"class-token-len": defaulting(integer(0), 8, "Class tokens of the encoder."),
	"pixel-shuffle": off("Join 2 × 2 patches of the encoder's output into one token."),
	"disable-vision-class-token": off("Drop class tokens after the encoder."),
	"dynamic-resolution": off("Images keep their size and are packed."),
	"img-h": defaulting(integer(1), 224, "Image height in pixels."),
	"img-w": defaulting(integer(1), 224, "Image width in pixels."),
	"patch-dim": defaulting(integer(1), 16, "Side of a patch in pixels."),
	"vision-projection-type": defaulting(
		choice(["affine", "mlp"]),
		"affine",
		"Projector from encoder to language width.",
	),
	"freeze-lm": off("Do not train the language model."),
	"freeze-vit": off("Do not train the encoder."),
	"freeze-projection": off("Do not train the projector."),
	"encoder-grad-participation": defaulting(
		choice(["exact", "corrected"]),
		"exact",
		"exact: gradient of the token mean; corrected: the encoder's gradient times ranks / ranks with images.",
	),
	"mimo-encoder-prefetch": off("Encode images of a frozen encoder ahead of time."),
	"mimo-encoder-prefetch-depth": defaulting(integer(1), 2, "Encoded batches kept ready."),
	"mimo-encoder-prefetch-debug": off("Print how long encoding and waiting took."),
} as const;
