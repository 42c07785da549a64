/** Rotary position embedding of query and key heads (docs/spec/language-model.md §3, docs/spec/families.md §2.2). */
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";
import { type AttentionHeads, checkFused } from "./attention.ts";

export interface RopePositions {
	readonly sequences: Sequences;
	/** Base of the angles' geometric series (--rotary-base). */
	readonly base: number;
	/** Whether a pair's columns are neighbours (--rotary-interleaved); default: half of the rotated columns apart. */
	readonly interleaved?: boolean;
	/** Radians a position for every pair of columns, f64 [rotated columns / 2]; default: the series of `base`. */
	readonly frequencies?: Tensor | null;
	/** Factor of every cosine and sine; default 1. */
	readonly amplitude?: number;
	/** Position of every sequence's first token here, i32 [sequences]; default 0. Without gradient. */
	readonly firstPositions?: Tensor;
}

export interface RopeOptions extends AttentionHeads, RopePositions {
	/** Part of a head that turns, its first columns, in (0, 1] (--rotary-percent). */
	readonly percent: number;
}

/**
 * Turns every query and key head by its token's position in its sequence; values pass. qkv_T((nq+2ng)d), per key head
 * [q … q, k, v], f32 or bf16 → the same shape and type.
 */
export function rope(tape: Tape, qkv: Tensor, options: RopeOptions): Tensor {
	const { queryHeads, keyHeads, headDim } = options;
	checkFused("rope", qkv, options.sequences, options);
	const queriesPerKey = queryHeads / keyHeads;
	return turn(tape, qkv, options, {
		groups: keyHeads,
		heads_per_group: queriesPerKey + 2,
		rotated_per_group: queriesPerKey + 1,
		head_dim: headDim,
		rotary_dim: Math.floor(headDim * options.percent),
		first_column: 0,
	});
}

/** Turns the last `rotated` columns of every head of x_T(heads·d), f32 or bf16 → the same shape and type. */
export function ropeLast(
	tape: Tape,
	x: Tensor,
	options: RopePositions & { readonly heads: number; readonly rotated: number },
): Tensor {
	const headDim = x.width / options.heads;
	return turn(tape, x, options, {
		groups: options.heads,
		heads_per_group: 1,
		rotated_per_group: 1,
		head_dim: headDim,
		rotary_dim: options.rotated,
		first_column: headDim - options.rotated,
	});
}

/** Heads of a token by groups, and the columns of a head that turn. */
interface Layout {
	readonly groups: number;
	readonly heads_per_group: number;
	readonly rotated_per_group: number;
	readonly head_dim: number;
	readonly rotary_dim: number;
	readonly first_column: number;
}

function turn(tape: Tape, x: Tensor, options: RopePositions, layout: Layout): Tensor {
	const { device } = tape;
	const { sequences } = options;
	const { rotary_dim: columns } = layout;
	if (columns % 2 !== 0) throw new RangeError(`rope turns pairs of columns, not ${columns} of a head.`);
	const y = tape.output(Tensor.empty(device, x.shape, x.dtype), x.gradient !== null);
	const cuSeqlens = sequences.cuSeqlens.share();
	const run = (from: Tensor, to: Tensor, angleScale: 1 | -1) =>
		device.run("rope_forward", {
			...layout,
			x: from,
			y: to,
			cu_seqlens: cuSeqlens,
			first_positions: options.firstPositions ?? null,
			frequencies: options.frequencies ?? null,
			sequences: sequences.count,
			tokens: sequences.tokens,
			max_seqlen: sequences.maxSeqlen,
			x_stride: from.stride,
			y_stride: to.stride,
			base: options.base,
			angle_scale: angleScale,
			amplitude: options.amplitude ?? 1,
			interleaved: options.interleaved ? 1 : 0,
			dtype: from.dtypeCode,
		});
	run(x, y, 1);
	tape.record({
		name: "rope",
		outputs: [y],
		keep: [options.firstPositions ?? null, options.frequencies ?? null],
		own: [cuSeqlens],
		backward: ([dy]) => {
			if (!x.gradient) return;
			const dx = x.gradient.target();
			run(dy!, dx, -1);
			x.gradient.accumulate(dx);
		},
	});
	return y;
}
