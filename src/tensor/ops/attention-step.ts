/** Attention of one more token of every sequence against cached keys and values (docs/spec/language-model.md §3). */
import { Tensor } from "../tensor.ts";
import type { AttentionHeads } from "./attention.ts";
import { fusedWidth } from "./attention.ts";

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
 * softmax(scale q kᵀ) v of the new token of S sequences over itself and all before. qkv_S((nq+2ng)d), per key head
 * [q … q, k, v], of the cache's type → o_S(nq·d). The new key and value become row `lengths` of their sequence.
 */
export function attentionStep(
	qkv: Tensor,
	cache: KeyValueCache,
	places: CachePlaces,
	{ queryHeads, keyHeads, headDim, softmaxScale }: AttentionHeads & { readonly softmaxScale: number },
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
		o,
		sequences: qkv.rows,
		rows: cache.rows,
		max_length: places.maxLength,
		query_heads: queryHeads,
		key_heads: keyHeads,
		head_dim: headDim,
		token_stride: qkv.stride,
		group_stride: (queriesPerKey + 2) * headDim,
		softmax_scale: softmaxScale,
		dtype: qkv.dtypeCode,
	});
	return o;
}
