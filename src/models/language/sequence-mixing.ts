/**
 * The operations that mix the tokens of a sequence: rotary embedding, attention, convolution, state space scan, delta rule. Training applies
 * them to whole sequences; decoding replaces them by versions that keep a cache and go on token by token.
 */
import {
	attention,
	causalConv1d,
	gatedDelta,
	type LatentStep,
	rope,
	ropeLast,
	ssdScan,
	type Tensor,
} from "../../tensor/index.ts";

export interface Mixing {
	readonly rope: typeof rope;
	readonly ropeLast: typeof ropeLast;
	readonly attention: typeof attention;
	/** Attention of the heads that multi-latent attention makes of its latents; default: attention, since a cache keeps the latents. */
	readonly latentAttention?: typeof attention;
	/** Takes the latents and turned shared key columns of all tokens of multi-latent attention, which runs as ever. */
	readonly keepLatent?: (latent: Tensor, position: Tensor) => void;
	/** Multi-latent attention of one more token of each sequence to the kept latents. */
	readonly latentStep?: LatentStep;
	readonly convolution: typeof causalConv1d;
	readonly scan: typeof ssdScan;
	readonly delta: typeof gatedDelta;
}

/** The operations on whole sequences, without a cache. */
export const wholeSequences: Mixing = {
	...{ rope, ropeLast, attention },
	...{ convolution: causalConv1d, scan: ssdScan, delta: gatedDelta },
};
