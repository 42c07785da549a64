/** Attention within each packed sequence, grouped queries, on a fused projection (docs/spec/language-model.md §3). */
import { AttentionMask, type AttentionMaskName } from "../../native/abi.ts";
import type { Parameter } from "../parameter.ts";
import type { Sequences } from "../sequences.ts";
import type { Tape } from "../tape.ts";
import { Tensor } from "../tensor.ts";

export interface AttentionHeads {
	/** Query heads held here; a multiple of keyHeads. */
	readonly queryHeads: number;
	/** Key and value heads held here. */
	readonly keyHeads: number;
	readonly headDim: number;
	/** Columns of a value head and of an output head; default headDim. */
	readonly valueDim?: number;
}

export interface AttentionOptions extends AttentionHeads {
	readonly sequences: Sequences;
	readonly mask: AttentionMaskName;
	/** Most keys that a query of a causal mask sees, its own among them; default null: all. */
	readonly window?: number | null;
	/** Factor of the scores; default 1 / sqrt(headDim). */
	readonly softmaxScale?: number;
	/** A logit of each query head here [queryHeads] that joins its softmax's denominators, of qkv's type; default null: none. */
	readonly sinks?: Parameter | null;
	/**
	 * Probability of dropping an attention probability, in [0, 1); default 0. The mask depends on the seed, the token's
	 * and the head's place in the whole batch and layer, and the key's position in its sequence: no packing or layout
	 * changes it.
	 */
	readonly dropout?: number;
	readonly dropoutSeed?: number | bigint;
	/** Global index of token 0; default 0. */
	readonly firstToken?: number;
	/** Index of query head 0 among the layer's `fullHeads` query heads; default 0 of queryHeads. */
	readonly firstHead?: number;
	readonly fullHeads?: number;
}

/** Columns of a fused projection: per key head its query heads, its key and its value. */
function fusedWidth({ queryHeads, keyHeads, headDim, valueDim = headDim }: AttentionHeads): number {
	return (queryHeads + keyHeads) * headDim + keyHeads * valueDim;
}

/** Refuses a fused projection that does not fit the heads or the sequences. */
export function checkFused(operation: string, qkv: Tensor, sequences: Sequences, heads: AttentionHeads): void {
	if (heads.queryHeads % heads.keyHeads !== 0) {
		throw new RangeError(
			`${operation} cannot share ${heads.keyHeads} key heads among ${heads.queryHeads} query heads.`,
		);
	}
	if (qkv.width !== fusedWidth(heads) || qkv.rows !== sequences.tokens) {
		throw new RangeError(
			`${operation} takes a projection [${sequences.tokens}, ${fusedWidth(heads)}], not [${qkv.rows}, ${qkv.width}].`,
		);
	}
}

/**
 * softmax(scale q kᵀ) v per sequence and head. qkv_T((nq+ng)d+ng·e), per key head [q … q, k, v]; f32 or bf16 →
 * o_T(nq·e) of the same type, heads in order.
 */
export function attention(tape: Tape, qkv: Tensor, options: AttentionOptions): Tensor {
	const { device } = tape;
	const { queryHeads, headDim, valueDim = headDim, sequences, sinks = null } = options;
	checkFused("attention", qkv, sequences, options);
	const { tokens } = sequences;
	const trains = qkv.gradient !== null || sinks?.trainable === true;
	const o = tape.output(Tensor.empty(device, [tokens, queryHeads * valueDim], qkv.dtype), trains);
	const lse = Tensor.empty(device, [tokens, queryHeads]);
	const cuSeqlens = sequences.cuSeqlens.share();
	const shared = { ...sharedArguments(qkv, options), cu_seqlens: cuSeqlens };
	using forward = FusedParts.of(qkv, options);
	device.run("attention_forward", { ...shared, q: forward.q, k: forward.k, v: forward.v, o, lse });
	const ofSinks = sinks && {
		sinks: sinks.value,
		lse,
		o,
		tokens,
		heads: queryHeads,
		head_dim: valueDim,
		dtype: qkv.dtypeCode,
	};
	if (ofSinks) device.run("attention_sinks_forward", ofSinks);
	tape.record({
		name: "attention",
		outputs: [o],
		keep: [qkv, o],
		own: [lse, cuSeqlens],
		parameters: sinks ? [sinks] : [],
		backward: ([gradient]) => {
			if (sinks?.mainGradient) {
				const { mainGradient: dsinks } = sinks;
				device.run("attention_sinks_backward", { ...ofSinks!, d_o: gradient!, dsinks, d_o_stride: gradient!.stride });
			}
			if (!qkv.gradient) return;
			const dqkv = qkv.gradient.target();
			using x = FusedParts.of(qkv, options);
			using dx = FusedParts.of(dqkv, options);
			device.run("attention_backward", {
				...shared,
				d_o: gradient!,
				q: x.q,
				k: x.k,
				v: x.v,
				o,
				lse,
				dq: dx.q,
				dk: dx.k,
				dv: dx.v,
				d_o_stride: gradient!.stride,
				d_token_stride: dqkv.stride,
			});
			qkv.gradient.accumulate(dqkv);
		},
	});
	return o;
}

/** Arguments that both directions have. */
function sharedArguments(qkv: Tensor, options: AttentionOptions) {
	const { queryHeads, keyHeads, headDim, valueDim = headDim, sequences, dropout = 0 } = options;
	return {
		sequences: sequences.count,
		tokens: sequences.tokens,
		max_seqlen: sequences.maxSeqlen,
		query_heads: queryHeads,
		key_heads: keyHeads,
		head_dim: headDim,
		value_dim: valueDim,
		token_stride: qkv.stride,
		group_stride: (queryHeads / keyHeads + 1) * headDim + valueDim,
		// Without dropout the call is the same in every microbatch, so that CUDA graphs repeat.
		dropout_seed: dropout > 0 ? (options.dropoutSeed ?? 0n) : 0n,
		first_token: dropout > 0 ? (options.firstToken ?? 0) : 0,
		first_head: options.firstHead ?? 0,
		full_heads: options.fullHeads ?? queryHeads,
		// A window that no sequence exceeds leaves the choice among all kernels.
		window: (options.window ?? 0) < sequences.maxSeqlen ? (options.window ?? 0) : 0,
		softmax_scale: options.softmaxScale ?? 1 / Math.sqrt(headDim),
		dropout,
		mask: AttentionMask[options.mask],
		dtype: qkv.dtypeCode,
	};
}

/** Windows on the first key head's queries, key and value; the kernels step from head to head themselves. */
class FusedParts implements Disposable {
	private constructor(
		readonly q: Tensor,
		readonly k: Tensor,
		readonly v: Tensor,
	) {}

	/** Of a fused projection, or of its gradient. */
	static of(fused: Tensor, { queryHeads, keyHeads, headDim, valueDim = headDim }: AttentionHeads): FusedParts {
		const queries = (queryHeads / keyHeads) * headDim;
		const part = (start: number, width: number) => fused.columns(start, width);
		return new FusedParts(part(0, queries), part(queries, headDim), part(queries + headDim, valueDim));
	}

	[Symbol.dispose](): void {
		for (const part of [this.q, this.k, this.v]) part[Symbol.dispose]();
	}
}

// Attention of one more token of every sequence against cached keys and values (docs/spec/language-model.md §3).

export interface KeyValueCache {
	/** [key heads · rows, head width], a head's rows one after the other; f32 or bf16. */
	readonly keys: Tensor;
	readonly values: Tensor;
	/** Rows of a head, over all sequences. */
	readonly rows: number;
}

/** Places of a step's sequences in a cache of keys and values. */
export interface CachePlaces {
	/** First row of every sequence, i32 [S]. */
	readonly firstRows: Tensor;
	/** Tokens of every sequence in the cache so far, i32 [S]. */
	readonly lengths: Tensor;
	/** Upper bound of the lengths. */
	readonly maxLength: number;
}

/**
 * softmax(scale q kᵀ) v of the new token of S sequences over itself and all before, or those of its window. qkv_S((nq+2ng)d), per key head
 * [q … q, k, v], of the cache's type → o_S(nq·d). The new key and value become row `lengths` of their sequence.
 */
export function attentionStep(
	qkv: Tensor,
	cache: KeyValueCache,
	places: CachePlaces,
	{
		queryHeads,
		keyHeads,
		headDim,
		softmaxScale,
		window,
		sinks,
	}: AttentionHeads & Pick<AttentionOptions, "window" | "sinks"> & { readonly softmaxScale: number },
): Tensor {
	const { device } = qkv;
	if (qkv.width !== fusedWidth({ queryHeads, keyHeads, headDim }) || qkv.dtype !== cache.keys.dtype) {
		throw new RangeError(`A step of attention cannot take a ${qkv.dtype} projection [${qkv.shape}].`);
	}
	const queriesPerKey = queryHeads / keyHeads;
	const o = Tensor.empty(device, [qkv.rows, queryHeads * headDim], qkv.dtype);
	using q = qkv.columns(0, queriesPerKey * headDim);
	using k = qkv.columns(queriesPerKey * headDim, headDim);
	using v = qkv.columns((queriesPerKey + 1) * headDim, headDim);
	device.run("attention_step", {
		q,
		k,
		v,
		keys: cache.keys,
		values: cache.values,
		first_rows: places.firstRows,
		lengths: places.lengths,
		sinks: sinks?.value ?? null,
		o,
		sequences: qkv.rows,
		rows: cache.rows,
		max_length: places.maxLength,
		window: window ?? 0,
		query_heads: queryHeads,
		key_heads: keyHeads,
		head_dim: headDim,
		value_dim: headDim,
		token_stride: qkv.stride,
		group_stride: (queriesPerKey + 2) * headDim,
		value_stride: headDim,
		softmax_scale: softmaxScale,
		dtype: qkv.dtypeCode,
	});
	return o;
}
