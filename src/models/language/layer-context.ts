/** The context that every layer kind receives beside its input. */
import type { ModelParallel } from "../../parallel/index.ts";
import type { Parameter, Sequences, Tensor, TokenSlice } from "../../tensor/index.ts";
import type { HybridConfig } from "./config.ts";
import type { LayerMasks, ModelMasks } from "./masks.ts";
import type { TokenAxes } from "./model-chunk.ts";
import type { PooledBalancing } from "./pooled-balancing.ts";
import type { RouterState } from "./router-state.ts";
import type { Mixing } from "./sequence-mixing.ts";
import type { ExpertRows } from "./token-dispatcher/dispatcher.ts";

/**
 * Values that a LayerProbe observes. normed: the layer's normed input u_(T/tp)H, which the probe may change. heads: the input of the
 * output projection by head, all tokens, heads_T(heads·channels)/tp. routing: a token's routing weights, probabilities_(T/tp)K, which
 * the probe may change. preactivation: in passes that a backward follows, the activation's input z, once for a pass that is
 * recomputed: of a dense layer or a shared expert all tokens, z_T(F/tp), of routed experts without masks this rank's rows by expert.
 * channels, experts: of routed experts this rank's rows by expert, before and after fc2, whose projections then run apart.
 * routedGradient: the gradient of the routed experts' sum, [T/tp, H], which the probe may change. branch: the layer's output before the
 * residual, branch_(T/tp)H, which the probe may change.
 */
export type ProbeName =
	| "normed"
	| "heads"
	| "routing"
	| "preactivation"
	| "channels"
	| "experts"
	| "routedGradient"
	| "branch";

/** Of rows by expert: each expert's first row, i32 [experts + 1], and the rows' routing weights, f32 [rows]. */
export type ProbedExpertRows = Pick<ExpertRows, "offsets" | "rowProbability">;

/** One pass of a microbatch through a layer. */
export interface ProbedPass {
	readonly layer: number;
	/** Names the pass, such as "layer.3" or, where MTP depths share their layers, "mtp.1.layer.0". */
	readonly name: string;
	/** The tokens of this rank's run between layers. */
	readonly localTokens: TokenSlice;
}

/** Called with the values that it names. */
export type LayerProbe = {
	readonly [Name in ProbeName]?: (value: Tensor, pass: ProbedPass, rows?: ProbedExpertRows) => void;
};

export interface LayerContext {
	/** The configuration with this layer's own sizes. */
	readonly config: HybridConfig;
	readonly parallel: ModelParallel;
	/** A parameter of this layer by the end of its name, such as "mixer.in_proj.weight". */
	readonly weights: (name: string) => Parameter;
	/** Sequences of the whole microbatch. */
	readonly sequences: Sequences;
	/** The parts of the sequences in this rank's run of tokens between layers. */
	readonly localSequences: Sequences;
	/** Of a layer with a router; null: of any other. */
	readonly router: RouterState | null;
	/** Frequencies of rotary embeddings, f64, where they are no geometric series; else null. */
	readonly ropeFrequencies: Tensor | null;
	/** Positions on several axes, with the frequencies of each; null: tokens turn by their places in the sequences. */
	readonly axes: (TokenAxes & { readonly frequencies: readonly Tensor[] }) | null;
	/** Weight of the microbatch's router losses, each a mean over its tokens, in the sum that is differentiated. */
	readonly routerWeight: number;
	/** Takes the routers' statistics for the pooled balancing loss; null: the model has none, or no backward pass follows. */
	readonly pooled: PooledBalancing | null;
	/** Masks of an elastic model's sampled submodel; null: none. */
	readonly masks: ModelMasks | null;
	readonly layerMasks: LayerMasks | null;
	/** The operations that mix tokens of a sequence: attention, convolution, scan. */
	readonly mixing: Mixing;
	/** Observes the layer's value of this name; null: not observed. */
	readonly probe: (name: ProbeName) => ((value: Tensor, rows?: ProbedExpertRows) => void) | null;
	/**
	 * The coordinates of random numbers: the step's key, the layer's name, and the indices of the microbatch's tokens in the step.
	 */
	readonly random: {
		readonly key: number;
		readonly place: string;
		readonly tokens: TokenSlice;
		/** The tokens in this rank's run between layers. */
		readonly localTokens: TokenSlice;
	};
}
