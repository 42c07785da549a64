/** Shape and options of the vision transformer (docs/spec/vision.md §1, §2): RADIO, SigLIP, InternViT. */
import { UserError } from "../../system/errors.ts";
import type { LoraConfig } from "../lora.ts";
import type { PatchGrid } from "../tower.ts";

/** How the table of positions is fitted to an image's grid of patches (docs/spec/vision.md §1.4). */
export interface PositionOptions {
	/**
	 * cpe: the whole table to the square of the longer side, its top left corner kept. direct: straight to the grid.
	 * window: the table's own top left corner, stretched only where the grid is larger. bicubic: straight to the grid, by the
	 * bicubic filter; aligned: bilinear, its corners on the image's; antialias: by the triangle, as wide as the table's entries that a patch covers;
	 * none: there is no table.
	 */
	readonly mode: "cpe" | "direct" | "window" | "bicubic" | "antialias" | "aligned" | "none";
	/** First cut the table to the image's proportions. */
	readonly aspectRatioSelect: boolean;
	/** cpe: a random crop of the table for every image while a trainable tower trains. */
	readonly randomCrop: boolean;
}

/** Square windows of `side` patches from the top left corner on, which end with the image. */
export interface Windows {
	readonly side: number;
	/** Layers, from 0, that attend over whole images. */
	readonly full: readonly number[];
}

export interface VitConfig {
	readonly layers: number;
	readonly hiddenSize: number;
	readonly heads: number;
	readonly headDim: number;
	readonly ffnHiddenSize: number;
	readonly normEpsilon: number;
	/** The norms of the layers and behind them; RMSNorm has no bias. */
	readonly normalization: "LayerNorm" | "RMSNorm";
	readonly softmaxScale: number;
	/** Side of a square patch in pixels, and its frames; a patch has 3 temporalPatch patchSize² values. */
	readonly patchSize: number;
	readonly temporalPatch: number;
	/** Whether the embedding of patches has a bias. */
	readonly patchBias: boolean;
	/** Whether a norm stands between the embedding of patches and their positions. */
	readonly patchNorm: boolean;
	/** Whether queries, keys and values have biases. */
	readonly qkvBias: boolean;
	/** Whether the projections behind attention and those of the MLP have biases. */
	readonly linearBias: boolean;
	/** Whether queries and keys go through an RMSNorm over the columns of all heads, of epsilon 1e-6. */
	readonly qkNorm: boolean;
	/** Tokens put before the patches of every image. */
	readonly classTokens: number;
	/** Whether they have positions of their own. */
	readonly classPositions: boolean;
	/** Base of rotary embeddings of queries and keys by a patch's row and column; null: none. */
	readonly rotaryBase: number | null;
	/** Windows of the image in which the layers attend, but for the full ones; null: all attend over whole images. */
	readonly windows: Windows | null;
	/** Layers whose outputs become rows too, beside those of the last: DeepStack; or, with `joinsTaps`, before them. */
	readonly taps: readonly number[];
	readonly joinsTaps: boolean;
	/** Learned positions, in patches. */
	readonly positionTable: { readonly rows: number; readonly columns: number };
	readonly positions: PositionOptions;
	/** Activation of the MLP: Megatron's GELU by tanh, transformers' exact GELU, or SiLU of a gate. */
	readonly activation: "geluTanh" | "geluErf" | "swiglu";
	/** Layer scale: initial value of a trained factor for each column of the outputs of attention and MLP; null: no such factors. */
	readonly layerScale: number | null;
	/** MIMO has a norm after the last layer, Megatron-Bridge and Hugging Face have none (docs/spec/vision.md §1.6). */
	readonly finalLayerNorm: boolean;
	readonly dropClassTokens: boolean;
	/** Join 2 × 2 patches into one output row, four times as wide. */
	readonly pixelShuffle: boolean;
	readonly initMethodStd: number;
	/** Standard deviation of projections back into the residual stream. */
	readonly outputInitMethodStd: number;
	/** Adapters of the layers' projections, beside weights that are frozen; null: none. */
	readonly lora: LoraConfig | null;
	readonly dtype: "f32" | "bf16";
}

/** RADIO's values of the options that other towers have. */
export const plainTower = {
	...{ patchBias: false, patchNorm: false, qkvBias: true, linearBias: true, qkNorm: false, classPositions: false },
	...{
		layerScale: null,
		temporalPatch: 1,
		rotaryBase: null,
		taps: [],
		joinsTaps: false,
		normalization: "LayerNorm",
		windows: null,
	},
} as const satisfies Partial<VitConfig>;

/** Values of a patch. */
export function patchWidth({ patchSize, temporalPatch }: Pick<VitConfig, "patchSize" | "temporalPatch">): number {
	return 3 * temporalPatch * patchSize * patchSize;
}

/** Width of the rows that come of one layer. */
export function featureWidth({ hiddenSize, pixelShuffle }: VitConfig): number {
	return pixelShuffle ? 4 * hiddenSize : hiddenSize;
}

/** Width of the rows the tower gives: those of the last layer and of the taps. */
export function outputWidth(config: VitConfig): number {
	return featureWidth(config) * (1 + config.taps.length);
}

/** Rows the tower gives for an image (docs/spec/vision.md §2.4). */
export function outputRows(
	config: Pick<VitConfig, "pixelShuffle" | "dropClassTokens" | "classTokens">,
	grid: PatchGrid,
): number {
	const patches = grid.rows * grid.columns;
	if (config.pixelShuffle) return patches / 4;
	return config.dropClassTokens ? patches : patches + config.classTokens;
}

/** Throws a UserError where options contradict each other. */
export function checkVitConfig(config: VitConfig): void {
	if (config.pixelShuffle && !config.dropClassTokens && config.classTokens > 0) {
		throw new UserError("--pixel-shuffle joins patches alone: it needs --disable-vision-class-token.");
	}
	if (config.windows !== null && (config.classTokens > 0 || config.windows.side % (config.pixelShuffle ? 2 : 1) > 0)) {
		throw new UserError(
			"--vision-window-size: windows hold whole blocks of patches that become a row, and no class tokens (--class-token-len 0).",
		);
	}
}
