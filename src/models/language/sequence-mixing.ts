/**
 * The operations that mix the tokens of a sequence: rotary embedding, attention, convolution, state space scan. Training applies
 * them to whole sequences; decoding replaces them by versions that keep a cache and go on token by token.
 */
import { attention } from "../../tensor/ops/attention.ts";
import { causalConv1d } from "../../tensor/ops/causal-conv1d.ts";
import { rope } from "../../tensor/ops/rope.ts";
import { ssdScan } from "../../tensor/ops/ssd.ts";

export interface Mixing {
	readonly rope: typeof rope;
	readonly attention: typeof attention;
	readonly convolution: typeof causalConv1d;
	readonly scan: typeof ssdScan;
}

/** The operations on whole sequences, without a cache. */
export const wholeSequences: Mixing = { rope, attention, convolution: causalConv1d, scan: ssdScan };
