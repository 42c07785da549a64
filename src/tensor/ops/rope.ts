/** Rotary position embedding of a fused projection's queries and keys (docs/spec/language-model.md §3). */
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";
import { type AttentionHeads, checkFused } from "./attention.ts";

export interface RopeOptions extends AttentionHeads {
	readonly sequences: Sequences;
	/** Base of the angles' geometric series (--rotary-base). */
	readonly base: number;
	/** Part of a head that turns, its first columns, in (0, 1] (--rotary-percent). */
	readonly percent: number;
	/** Radians a position for every pair of columns, f64 [rotated columns / 2]; default: the series of `base`. */
	readonly frequencies?: Tensor | null;
	/** Factor of every cosine and sine; default 1. */
	readonly amplitude?: number;
	/** Position of every sequence's first token here, i32 [sequences]; default 0. Without gradient. */
	readonly firstPositions?: Tensor;
}

/**
 * Turns every query and key head by its token's position in its sequence; values pass. qkv_T((nq+2ng)d), per key head
 * [q … q, k, v], f32 or bf16 → the same shape and type.
 */
export function rope(tape: Tape, qkv: Tensor, options: RopeOptions): Tensor {
	const { device } = tape;
	const { sequences } = options;
	checkFused("rope", qkv, sequences, options);
	const rotaryDim = Math.floor(options.headDim * options.percent);
	if (rotaryDim % 2 !== 0) throw new RangeError(`rope turns pairs of columns, not ${rotaryDim} of a head.`);
	const queriesPerKey = options.queryHeads / options.keyHeads;
	const y = tape.output(Tensor.empty(device, qkv.shape, qkv.dtype), qkv.gradient !== null);
	const cuSeqlens = sequences.cuSeqlens.share();
	const turn = (x: Tensor, to: Tensor, angleScale: 1 | -1) =>
		device.run("rope_forward", {
			x,
			y: to,
			cu_seqlens: cuSeqlens,
			first_positions: options.firstPositions ?? null,
			frequencies: options.frequencies ?? null,
			sequences: sequences.count,
			tokens: sequences.tokens,
			max_seqlen: sequences.maxSeqlen,
			groups: options.keyHeads,
			heads_per_group: queriesPerKey + 2,
			rotated_per_group: queriesPerKey + 1,
			head_dim: options.headDim,
			rotary_dim: rotaryDim,
			x_stride: x.stride,
			y_stride: to.stride,
			base: options.base,
			angle_scale: angleScale,
			amplitude: options.amplitude ?? 1,
			dtype: x.dtypeCode,
		});
	turn(qkv, y, 1);
	tape.record({
		name: "rope",
		outputs: [y],
		own: [cuSeqlens],
		backward: ([dy]) => {
			if (!qkv.gradient) return;
			const dqkv = qkv.gradient.target();
			turn(dy!, dqkv, -1);
			qkv.gradient.accumulate(dqkv);
		},
	});
	return y;
}
