/** The context that every layer kind receives. */
import type { ModelParallel } from "../../parallel/model-parallel.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { Sequences } from "../../tensor/sequences.ts";
import type { Tensor } from "../../tensor/tensor.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";
import type { HybridConfig } from "./config.ts";
import type { LayerMasks, ModelMasks } from "./masks.ts";
import type { Mixing } from "./sequence-mixing.ts";

/**
 * Values of a layer that are measured: its normed input u_(T/tp)H; the input of the projection back, head by head, of all tokens
 * (heads_T(heads·channels)/tp); of routed experts this rank's rows by expert, before (channels) and behind (experts) their second
 * projection, with the first row of every expert; and the layer's addend, branch_(T/tp)H, which may be changed.
 */
export type ProbeName = "normed" | "heads" | "channels" | "experts" | "branch";
export type LayerProbe = (layer: number, name: ProbeName, value: Tensor, offsets?: Tensor) => void;

export interface LayerContext {
	/** As this layer has it. */
	readonly config: HybridConfig;
	readonly parallel: ModelParallel;
	/** A parameter of this layer by the end of its name, such as "mixer.in_proj.weight". */
	readonly weights: (name: string) => Parameter;
	/** Sequences of the whole microbatch. */
	readonly sequences: Sequences;
	/** Sequences of the tokens that this rank holds between layers: the same ones, cut. */
	readonly localSequences: Sequences;
	/** Masks of an elastic model's microbatch; null: none. */
	readonly masks: ModelMasks | null;
	readonly layerMasks: LayerMasks | null;
	/** The operations that look along the sequences: attention, convolution, scan. */
	readonly mixing: Mixing;
	/** Sees values as they arise; null: they are not measured. */
	readonly probe: ((name: ProbeName, value: Tensor, offsets?: Tensor) => void) | null;
	/** Where random numbers come from: the step's key, the layer's name, and which of the step's tokens a microbatch has. */
	readonly random: {
		readonly key: number;
		readonly place: string;
		readonly tokens: TokenSlice;
		/** The part of them that this rank holds between layers. */
		readonly localTokens: TokenSlice;
	};
}
