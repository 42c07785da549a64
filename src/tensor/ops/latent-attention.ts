/** Heads of latent attention, and its decoding step on cached latents (docs/spec/families.md §2.4). */
import type { Tape } from "../tape.ts";
import { contiguous, copyInto, Tensor } from "../tensor.ts";
import type { CachePlaces } from "./attention.ts";

export interface LatentHeads {
	/** Heads held here. */
	readonly heads: number;
	/** Columns n of a query and a key that are not rotated. */
	readonly contentDim: number;
	/** Columns r that are, in keys those that all heads share. */
	readonly positionDim: number;
	/** Columns e of a value. */
	readonly valueDim: number;
}

/**
 * One projection [q, k, v] per head for attention: q_T(heads·(n+r)), kv_T(heads·(n+e)) with content and value per head, both
 * contiguous, position_Tr → qkv_T(heads·(2(n+r)+e)) of the same type, f32 or bf16. The gradient of `position` sums over the heads.
 */
export function latentHeads(
	tape: Tape,
	{ q, kv, position }: { readonly q: Tensor; readonly kv: Tensor; readonly position: Tensor },
	{ heads, contentDim, positionDim, valueDim }: LatentHeads,
): Tensor {
	const { device } = tape;
	const [queryWidth, contentWidth] = [heads * (contentDim + positionDim), heads * (contentDim + valueDim)];
	if (q.width !== queryWidth || kv.width !== contentWidth || position.width !== positionDim) {
		throw new RangeError(
			`latentHeads takes ${queryWidth}, ${contentWidth} and ${positionDim} columns, not ${q.width}, ${kv.width} and ${position.width}.`,
		);
	}
	const sizes = { heads, content_dim: contentDim, position_dim: positionDim, value_dim: valueDim };
	const shared = { ...sizes, tokens: q.rows, dtype: q.dtypeCode };
	const inputs = [q, kv, position] as const;
	const y = tape.output(
		Tensor.empty(device, [q.rows, queryWidth + contentWidth + queryWidth - heads * contentDim], q.dtype),
		inputs.some(({ gradient }) => gradient !== null),
	);
	device.run("latent_heads_forward", { ...shared, q, kv, position, y, position_stride: position.stride });
	tape.record({
		name: "latent_heads",
		outputs: [y],
		backward: ([gradient]) => {
			using dy = contiguous(gradient!);
			const targets = inputs.map(
				(input) => input.gradient?.contiguousTarget() ?? Tensor.empty(device, input.shape, input.dtype, "workspace"),
			);
			const [dq, dkv, dposition] = targets as [Tensor, Tensor, Tensor];
			device.run("latent_heads_backward", { ...shared, dy, dq, dkv, dposition, position_stride: dposition.stride });
			for (const [index, target] of targets.entries()) {
				using own = target;
				inputs[index]!.gradient?.accumulate(own.share());
			}
		},
	});
	return y;
}

/** A step's input: one token of each of S sequences. */
interface LatentToken {
	/** Turned queries q_S(heads·(n+r)), contiguous. */
	readonly q: Tensor;
	/** The normed latent [S, c]. */
	readonly latent: Tensor;
	/** The turned key columns of all heads [S, r]. */
	readonly position: Tensor;
}

interface LatentWeight extends LatentHeads {
	/** The projection from the latent to contents and values, [heads·(n+e), c]. */
	readonly weight: Tensor;
	readonly softmaxScale: number;
}

export type LatentStep = (token: LatentToken, options: LatentWeight) => Tensor;

/**
 * Attention of one more token of S sequences → o_S(heads·e). `cache` [rows, c+r] holds a token's latent and position, and gets the new
 * ones as row `lengths` of their sequence. Keys and values are never made: the projection of contents is applied to the queries, that of
 * values to the weighted sum of latents (the absorbed form), so that all heads share one key head of c+r columns.
 */
export function latentAttentionStep(
	{ q, latent, position }: LatentToken,
	{ heads, contentDim, positionDim, valueDim, weight, softmaxScale }: LatentWeight,
	cache: Tensor,
	places: CachePlaces,
): Tensor {
	const { device, rows: sequences, dtype } = q;
	const [rank, width, queryWidth] = [latent.width, cache.width, contentDim + positionDim];
	const perHead = (contentDim + valueDim) * rank;
	const make = (columns: number) => Tensor.empty(device, [sequences, heads * columns], dtype);
	const products = { batch: heads, m: sequences, bias: null, alpha: 1, beta: 0, transpose_a: 0, beside_collective: 0 };
	const types = { a_dtype: q.dtypeCode, b_dtype: weight.dtypeCode, c_dtype: q.dtypeCode };
	using queries = make(width);
	device.run("gemm", {
		...{ ...products, ...types, a: q, b: weight, c: queries, n: rank, k: contentDim, transpose_b: 0 },
		...{ a_stride: q.stride, b_stride: rank, c_stride: queries.stride },
		...{ a_batch_stride: queryWidth, b_batch_stride: perHead, c_batch_stride: width },
	});
	using turned = q.view([sequences * heads, queryWidth]);
	using byHead = queries.view([sequences * heads, width]);
	copyColumns(turned, contentDim, byHead, rank, positionDim);
	// Keys have the queries' stride between tokens.
	using keys = make(width);
	copyColumns(latent, 0, keys, 0, rank);
	copyColumns(position, 0, keys, rank, positionDim);
	using attended = make(rank);
	device.run("attention_step", {
		...{ q: queries, k: keys, v: keys, keys: cache, values: cache, o: attended },
		first_rows: places.firstRows,
		lengths: places.lengths,
		sequences,
		rows: cache.rows,
		max_length: places.maxLength,
		window: 0,
		sinks: null,
		...{ query_heads: heads, key_heads: 1, head_dim: width, value_dim: rank },
		...{ token_stride: queries.stride, group_stride: queries.stride, value_stride: cache.stride },
		softmax_scale: softmaxScale,
		dtype: q.dtypeCode,
	});
	const o = make(valueDim);
	using values = weight.rowsFrom(contentDim, weight.rows - contentDim);
	device.run("gemm", {
		...{ ...products, ...types, a: attended, b: values, c: o, n: valueDim, k: rank, transpose_b: 1 },
		...{ a_stride: attended.stride, b_stride: rank, c_stride: o.stride },
		...{ a_batch_stride: rank, b_batch_stride: perHead, c_batch_stride: valueDim },
	});
	return o;
}

function copyColumns(from: Tensor, first: number, to: Tensor, place: number, width: number): void {
	using source = from.columns(first, width);
	using target = to.columns(place, width);
	copyInto(source, target);
}
