/** What every layer kind is given. */
import type { ModelParallel } from "../../parallel/model-parallel.ts";
import type { Parameter } from "../../tensor/parameter.ts";
import type { Sequences } from "../../tensor/sequences.ts";
import type { HybridConfig } from "./config.ts";

export interface LayerContext {
	readonly config: HybridConfig;
	readonly parallel: ModelParallel;
	/** A parameter of this layer by the end of its name, such as "mixer.in_proj.weight". */
	readonly weights: (name: string) => Parameter;
	/** Of the whole microbatch. */
	readonly sequences: Sequences;
	/** Of the tokens this rank holds between layers: the same sequences, cut. */
	readonly localSequences: Sequences;
}
