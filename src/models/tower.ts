/** The part of an encoder before its projector: fixed-width patches of items (images, sounds) in, rows of features out. */
import type { Device } from "../native/device.ts";
import type { Group } from "../parallel/index.ts";
import type { FloatDtype, Parameter, Tape, Tensor } from "../tensor/index.ts";
import type { PipelineSegment } from "./language/pipeline-segments.ts";
import type { LoraConfig } from "./lora.ts";
import type { ParameterSpec } from "./parameter-spec.ts";

/** Rows and columns of patches of one item; a sound has one column. */
export interface PatchGrid {
	readonly rows: number;
	readonly columns: number;
	/** How the picture stands in the text whose first tile this is; absent: the item is a picture, or a tile behind a first one. */
	readonly picture?: Picture;
}

/** A picture's tiles, all of one grid of patches: the whole picture, and `tiles.rows` × `tiles.columns` of it at a larger size. */
export interface Picture {
	readonly tiles: PatchGrid;
	/** The patches of the tiles together that are no padding. */
	readonly window: PatchGrid & { readonly top: number; readonly left: number };
	/** Size to which the window is resized, in rows of the text. */
	readonly kept: PatchGrid;
}

/** Called with values as they arise, such as RADIO's "embedder" or the projector's "projector". */
export type EncoderObserver = (name: string, value: Tensor) => void;

/** Floating-point operations of an item's forward pass; a multiply-add counts 2. */
export interface TowerWork {
	/** Of queries with keys and of scores with values. */
	readonly attention: number;
	/** Products of activations with weights. */
	readonly products: number;
}

export interface TowerInput {
	/** [Σ rows · columns, patchWidth], in the tower's dtype or f32; behind the first stage the stream of the stage before. */
	readonly patches: Tensor;
	readonly grids: readonly PatchGrid[];
	/** Philox key of the step, and each item's index in the step's global batch, for random choices; null: none are made. */
	readonly random: { readonly key: number; readonly indices: readonly number[] } | null;
}

/** The module that a tower is part of. */
export interface TowerPlace {
	readonly device: Device;
	/** Ranks that cut the tower. */
	readonly tp: Group;
	readonly parameters: { get(name: string): Parameter };
	/** Its part of the tower in this rank's pipeline stage. */
	readonly segment: PipelineSegment;
}

/** The rows between layers, which pipeline stages pass on. */
export interface TowerStream {
	readonly layers: number;
	/** Their width behind so many layers, with the tapped rows that they carry. */
	widthBehind(layers: number): number;
	/** Whether they lie window after window, in a window by blocks that become a row; else row by row. */
	readonly windowed: boolean;
	/** Rows of an item. */
	rowsOf(grid: PatchGrid): number;
}

export interface Tower {
	readonly dtype: FloatDtype;
	/** Values of a patch. */
	readonly patchWidth: number;
	/** Width of the features. */
	readonly outputWidth: number;
	/** null: the tower has no pipeline stages. */
	readonly stream: TowerStream | null;
	/** Adapters beside weights that are frozen; null: none. */
	readonly lora: LoraConfig | null;
	/** Rows of features of an item. */
	rowsOf(grid: PatchGrid): number;
	workOf(grid: PatchGrid): TowerWork;
	/** By full name, of a segment; default: of all of it. */
	parameters(segment?: PipelineSegment): readonly ParameterSpec[];
	/**
	 * Features_(Σ rowsOf)(outputWidth) of at least one item, equal on all tensor-parallel ranks; of a segment that others follow, the
	 * stream.
	 */
	forward(tape: Tape, place: TowerPlace, input: TowerInput, observe?: EncoderObserver): Tensor;
}
