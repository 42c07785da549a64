/** Attention in float64 on plain arrays, written from the formula, with which the kernels are compared. */

export interface ReferenceAttention {
	readonly queryHeads: number;
	readonly keyHeads: number;
	readonly headDim: number;
	/** Columns of a value; default headDim. */
	readonly valueDim?: number;
	readonly lengths: readonly number[];
	readonly causal: boolean;
	/** Most keys that a query sees, its own among them; absent: all before it. */
	readonly window?: number;
	readonly scale: number;
	/** A logit of each query head that joins its denominators; absent: none. */
	readonly sinks?: ArrayLike<number>;
	/** Factor of the probability of (token, query head, key's position); default 1. */
	readonly keep?: (token: number, head: number, key: number) => number;
}

export interface ReferenceResult {
	readonly o: Float64Array;
	/** Gradient of Σ weights·o with respect to the fused projection. */
	readonly gradient: (weights: ArrayLike<number>) => Float64Array;
}

/** softmax(scale q kᵀ) v of the fused projection qkv_T((nq+ng)d+ng·e), every row of scores whole. */
export function referenceAttention(qkv: Float64Array, shape: ReferenceAttention): ReferenceResult {
	const { queryHeads, keyHeads, headDim: d, valueDim: e = d, scale, keep = () => 1 } = shape;
	const perGroup = queryHeads / keyHeads;
	const ofGroup = (perGroup + 1) * d + e;
	const width = keyHeads * ofGroup;
	const tokens = shape.lengths.reduce((sum, length) => sum + length, 0);
	const o = new Float64Array(tokens * queryHeads * e);
	// Offsets of a head's query, key and value in a token's row.
	const heads = Array.from({ length: queryHeads }, (_, head) => {
		const group = Math.floor(head / perGroup) * ofGroup;
		return { head, q: group + (head % perGroup) * d, k: group + perGroup * d, v: group + (perGroup + 1) * d };
	});
	const dot = (a: ArrayLike<number>, at: number, b: ArrayLike<number>, bt: number, columns = d) => {
		let sum = 0;
		for (let i = 0; i < columns; i++) sum += a[at + i]! * b[bt + i]!;
		return sum;
	};
	/** Calls `visit` for every query row of every head with its probabilities over its sequence's first keys. */
	const eachRow = (
		visit: (row: (typeof heads)[number] & { begin: number; token: number; p: Float64Array }) => void,
	) => {
		let begin = 0;
		for (const length of shape.lengths) {
			for (const at of heads) {
				for (let query = 0; query < length; query++) {
					const token = begin + query;
					const p = new Float64Array(shape.causal ? query + 1 : length);
					for (let key = 0; key < p.length; key++) {
						const hidden = shape.window !== undefined && key <= query - shape.window;
						p[key] = hidden
							? Number.NEGATIVE_INFINITY
							: scale * dot(qkv, token * width + at.q, qkv, (begin + key) * width + at.k);
					}
					const sink = shape.sinks?.[at.head] ?? Number.NEGATIVE_INFINITY;
					const top = p.reduce((a, b) => Math.max(a, b), sink);
					for (let key = 0; key < p.length; key++) p[key] = Math.exp(p[key]! - top);
					const sum = p.reduce((a, b) => a + b, Math.exp(sink - top));
					for (let key = 0; key < p.length; key++) p[key]! /= sum;
					visit({ ...at, begin, token, p });
				}
			}
			begin += length;
		}
	};
	eachRow(({ head, v, begin, token, p }) => {
		for (let key = 0; key < p.length; key++) {
			const weight = p[key]! * keep(token, head, key);
			const out = (token * queryHeads + head) * e;
			for (let i = 0; i < e; i++) o[out + i]! += weight * qkv[(begin + key) * width + v + i]!;
		}
	});
	return {
		o,
		gradient: (weights) => {
			const gradient = new Float64Array(qkv.length);
			eachRow(({ head, q, k, v, begin, token, p }) => {
				const out = (token * queryHeads + head) * e;
				const dp = p.map((_, key) => keep(token, head, key) * dot(weights, out, qkv, (begin + key) * width + v, e));
				const mean = p.reduce((sum, value, key) => sum + value * dp[key]!, 0);
				for (let key = 0; key < p.length; key++) {
					const row = (begin + key) * width;
					const ds = scale * p[key]! * (dp[key]! - mean);
					const weight = p[key]! * keep(token, head, key);
					for (let i = 0; i < e; i++) gradient[row + v + i]! += weight * weights[out + i]!;
					for (let i = 0; i < d; i++) {
						gradient[row + k + i]! += ds * qkv[token * width + q + i]!;
						gradient[token * width + q + i]! += ds * qkv[row + k + i]!;
					}
				}
			});
			return gradient;
		},
	};
}
