/**
 * The operations that mix the tokens of a sequence: rotary embedding, attention, convolution, state space scan, delta rule. Training applies
 * them to whole sequences; decoding replaces them by versions that keep a cache and go on token by token.
 */
import { attention, causalConv1d, gatedDelta, rope, ssdScan } from "../../tensor/index.ts";

export interface Mixing {
	readonly rope: typeof rope;
	readonly attention: typeof attention;
	readonly convolution: typeof causalConv1d;
	readonly scan: typeof ssdScan;
	readonly delta: typeof gatedDelta;
}

/** The operations on whole sequences, without a cache. */
export const wholeSequences: Mixing = { rope, attention, convolution: causalConv1d, scan: ssdScan, delta: gatedDelta };
