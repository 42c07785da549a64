/**
 * The operations that look along a sequence: rotary positions, attention, the convolution and the state space scan. Training
 * runs them over whole sequences; decoding also keeps what they have seen, and then goes on a token at a time.
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

/** The operations over whole sequences, which keep nothing for later tokens. */
export const wholeSequences: Mixing = { rope, attention, convolution: causalConv1d, scan: ssdScan };
