/** Compares a model with Hugging Face's vision-language models (docs/spec/checkpoint.md §4.4, transformers' NemotronH_Omni). */
import type { TrainingConfiguration } from "./schema.ts";

type Model = Partial<TrainingConfiguration>;

/** A property and whether a model has it; null: unknown from its description. */
type Need = readonly [what: string, holds: (c: Model) => boolean | null];

function need<Property extends keyof TrainingConfiguration>(
	what: string,
	property: Property,
	holds: (value: TrainingConfiguration[Property]) => boolean,
): Need {
	return [
		what,
		(c) => {
			const value = c[property];
			return value === undefined ? null : holds(value as TrainingConfiguration[Property]);
		},
	];
}

const needs: readonly Need[] = [
	need("vision-projection-type mlp", "visionProjectionType", (type) => type === "mlp"),
	need("vision-projection-norm", "visionProjectionNorm", (norm) => norm),
	need("norm-epsilon 1e-5", "normEpsilon", (epsilon) => epsilon === 1e-5),
	need("pixel-shuffle", "pixelShuffle", (shuffle) => shuffle),
	need("disable-vision-class-token", "disableVisionClassToken", (disabled) => disabled),
	need("no vision-final-layernorm", "visionFinalLayernorm", (norm) => !norm),
	need("vision-position-mode cpe", "visionPositionMode", (mode) => mode === "cpe"),
	[
		"vision-max-img-h as large as vision-max-img-w",
		({ visionMaxImgH: height, visionMaxImgW: width }) =>
			height === undefined || width === undefined ? null : height === width,
	],
	[
		"vision-kv-channels of vision-hidden-size / vision-num-attention-heads",
		({ visionKvChannels: channels, visionNumAttentionHeads: heads, visionHiddenSize: width }) =>
			channels === undefined || heads === undefined ? null : channels * heads === width,
	],
];

/** A clause that names the properties that a model with an encoder lacks to be saved as such a model; null: none is known. */
export function lackingOfPublished(model: Model): string | null {
	const lacking = needs.flatMap(([what, holds]) => (holds(model) === false ? [what] : []));
	return lacking.length === 0 ? null : `Hugging Face's vision-language model of NemotronH needs ${lacking.join(", ")}`;
}
