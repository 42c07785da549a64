/** The context that every layer kind receives. */
import type { ModelParallel } from "../../parallel/model-parallel.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { Sequences } from "../../tensor/sequences.ts";
import type { TokenSlice } from "../../tensor/token-slice.ts";
import type { HybridConfig } from "./config.ts";
import type { Mixing } from "./mixing.ts";

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
	/** What looks along the sequences. */
	readonly mixing: Mixing;
	/** Where random numbers come from: the step's key, the layer's name, and which of the step's tokens a microbatch has. */
	readonly random: {
		readonly key: number;
		readonly place: string;
		readonly tokens: TokenSlice;
		/** The part of them that this rank holds between layers. */
		readonly localTokens: TokenSlice;
	};
}
