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
	need("vision-projection-normalization RMSNorm", "visionProjectionNormalization", (norm) => norm === "RMSNorm"),
	need("vision-projection-activation squared-relu", "visionProjectionActivation", (of) => of === "squared-relu"),
	need("no vision-projection-bias", "visionProjectionBias", (bias) => !bias),
	need("no vision-projection-stem", "visionProjectionStem", (stem) => !stem),
	need("no vision-patch-bias", "visionPatchBias", (bias) => !bias),
	need("no vision-patch-norm", "visionPatchNorm", (norm) => !norm),
	need("vision-add-bias-linear", "visionAddBiasLinear", (bias) => bias),
	need("vision-add-qkv-bias", "visionAddQkvBias", (bias) => bias),
	need("no vision-qk-norm", "visionQkNorm", (norm) => !norm),
	need("no vision-class-token-positions", "visionClassTokenPositions", (positions) => !positions),
	need("no vision-image-newline", "visionImageNewline", (newline) => !newline),
	need("no vision-feature-layers", "visionFeatureLayers", (layers) => layers === null),
	need("no vision-layer-scale", "visionLayerScale", (scale) => scale === null),
	need("norm-epsilon 1e-5", "normEpsilon", (epsilon) => epsilon === 1e-5),
	need("pixel-shuffle", "pixelShuffle", (shuffle) => shuffle),
	need("disable-vision-class-token", "disableVisionClassToken", (disabled) => disabled),
	need("no vision-final-layernorm", "visionFinalLayernorm", (norm) => !norm),
	need("vision-position-mode cpe", "visionPositionMode", (mode) => mode === "cpe"),
	need("vision-normalization LayerNorm", "visionNormalization", (norm) => norm === "LayerNorm"),
	need("vision-activation gelu or gelu-tanh", "visionActivation", (kind) => kind !== "swiglu"),
	need("no vision-window-size", "visionWindowSize", (size) => size === null),
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

/**
 * Kinds of image processors: that of transformers' NemotronH_Omni resizes an image to a grid of patches near its own size, that of
 * NemotronH_Nano_VL_V2 cuts it into tiles.
 */
export type ProcessorKind = "dynamic" | "tiles";

const processors: Readonly<Record<ProcessorKind, { readonly model: string; readonly needs: readonly Need[] }>> = {
	dynamic: {
		model: "NemotronH_Omni",
		needs: [
			need("no use-tiling", "useTiling", (tiled) => !tiled),
			[
				"dynamic-resolution, since images of one size (img-h, img-w) have no place in it",
				({ dynamicResolution: dynamic, useTiling: tiled }) =>
					dynamic === undefined ? null : dynamic || tiled === true,
			],
			need("dynamic-resolution-min-side 0", "dynamicResolutionMinSide", (side) => side === 0),
		],
	},
	tiles: {
		model: "NemotronH_Nano_VL_V2",
		needs: [
			need("no dynamic-resolution", "dynamicResolution", (dynamic) => !dynamic),
			need("use-tiling", "useTiling", (tiled) => tiled),
			need("min-num-tiles 1", "minNumTiles", (least) => least === 1),
			need("no use-tile-tags", "useTileTags", (tags) => !tags),
			need("no use-area-weighted-aspect-ratio", "useAreaWeightedAspectRatio", (weighted) => !weighted),
		],
	},
};

/** A clause that names what a model lacks to have its images from such a processor; null: nothing is known to lack. */
export function lackingOfProcessor(c: Model, kind: ProcessorKind): string | null {
	const { model, needs: all } = processors[kind];
	const lacking = lackingOf(all, c);
	return lacking === null ? null : `Hugging Face's image processor of ${model} needs ${lacking}`;
}

const llavaNeeds: readonly Need[] = [
	need("vision-projection-type mlp", "visionProjectionType", (type) => type === "mlp"),
	need("no vision-projection-norm", "visionProjectionNorm", (norm) => !norm),
	need("vision-projection-activation gelu", "visionProjectionActivation", (of) => of === "gelu"),
	need("vision-projection-bias", "visionProjectionBias", (bias) => bias),
	need("no pixel-shuffle", "pixelShuffle", (shuffle) => !shuffle),
	need("vision-patch-bias", "visionPatchBias", (bias) => bias),
	need("no vision-projection-stem", "visionProjectionStem", (stem) => !stem),
	need("no vision-patch-norm", "visionPatchNorm", (norm) => !norm),
	need("vision-add-bias-linear", "visionAddBiasLinear", (bias) => bias),
	need("no vision-feature-layers", "visionFeatureLayers", (layers) => layers === null),
	need("class-token-len 0", "classTokenLen", (tokens) => tokens === 0),
	need("no vision-image-newline", "visionImageNewline", (newline) => !newline),
	[
		"vision-projection-ffn-hidden-size of hidden-size",
		({ visionProjectionFfnHiddenSize: inner, hiddenSize: width }) =>
			inner === undefined || width === undefined ? null : inner === width,
	],
];

/** Whether a model with an encoder can be LLaVA with a SigLIP tower, as far as its description tells. */
export function isLlava(model: Model): boolean {
	return lackingOf(llavaNeeds, model) === null;
}

/** A clause that names the properties that a model with an encoder lacks to be saved as such a model; null: none is known. */
export function lackingOfPublished(model: Model): string | null {
	const lacking = lackingOf(needs, model);
	return lacking === null ? null : `Hugging Face's vision-language model of NemotronH needs ${lacking}`;
}

function lackingOf(all: readonly Need[], model: Model): string | null {
	return all.flatMap(([what, holds]) => (holds(model) === false ? [what] : [])).join(", ") || null;
}
