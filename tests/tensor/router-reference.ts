/** The router of docs/spec/language-model.md §4.2–§4.4 in float64 on plain arrays, a token at a time. */

export interface ReferenceOptions {
	readonly topk: number;
	readonly scoreFunction: "sigmoid" | "softmax";
	readonly preSoftmax?: boolean;
	readonly scalingFactor?: number;
	readonly bias?: ArrayLike<number>;
	readonly groups?: { readonly count: number; readonly topk: number; readonly scoreTopk: number };
}

export interface ReferenceRouting {
	/** [T][K] selected experts, ascending. */
	readonly index: number[][];
	/** [T K] their weights. */
	readonly probabilities: Float64Array;
	/** [T][E] scores over all experts that sum to one. */
	readonly normalised: number[][];
	/** [T][K] the top-k without bias and group limit. */
	readonly unbiased: number[][];
}

function softmax(x: number[]): number[] {
	const largest = Math.max(...x);
	const y = x.map((v) => Math.exp(v - largest));
	const sum = y.reduce((a, b) => a + b, 0);
	return y.map((v) => v / sum);
}

/** Indices of the k largest in ascending order, ties to the lower index. */
function largest(values: number[], k: number): number[] {
	return values
		.map((_, i) => i)
		.sort((a, b) => values[b]! - values[a]! || a - b)
		.slice(0, k)
		.sort((a, b) => a - b);
}

export function referenceRouting(logits: Float64Array, experts: number, options: ReferenceOptions): ReferenceRouting {
	const { topk, scalingFactor = 1, groups } = options;
	const index: number[][] = [];
	const probabilities: number[] = [];
	const normalised: number[][] = [];
	const unbiased: number[][] = [];
	for (let t = 0; t < logits.length / experts; t++) {
		const row = [...logits.subarray(t * experts, (t + 1) * experts)];
		const sigmoid = options.scoreFunction === "sigmoid";
		const scores = sigmoid ? row.map((l) => 1 / (1 + Math.exp(-l))) : softmax(row);
		// Megatron selects by the scores; with softmax after top-k, by the logits, and scores groups by sums of logits too.
		let key = (sigmoid || options.preSoftmax ? scores : row).map((s, e) => s + (options.bias?.[e] ?? 0));
		if (groups) {
			const size = experts / groups.count;
			const of = (g: number) => key.slice(g * size, (g + 1) * size).sort((a, b) => b - a);
			const groupScores = Array.from({ length: groups.count }, (_, g) =>
				of(g)
					.slice(0, groups.scoreTopk)
					.reduce((a, b) => a + b, 0),
			);
			const kept = largest(groupScores, groups.topk);
			key = key.map((v, e) => (kept.includes(Math.floor(e / size)) ? v : Number.NEGATIVE_INFINITY));
		}
		const selected = largest(key, topk);
		let weights = selected.map((e) => scores[e]!);
		if (sigmoid && topk > 1) {
			const sum = weights.reduce((a, b) => a + b, 0) + 1e-20;
			weights = weights.map((w) => w / sum);
		}
		if (!sigmoid && !options.preSoftmax) weights = softmax(selected.map((e) => row[e]!));
		const total = scores.reduce((a, b) => a + b, 0) + 1e-20;
		index.push(selected);
		probabilities.push(...weights.map((w) => scalingFactor * w));
		normalised.push(scores.map((s) => s / total));
		unbiased.push(largest(scores, topk));
	}
	return { index, probabilities: Float64Array.from(probabilities), normalised, unbiased };
}

/** α E / (K T² S) Σ_q Σ_e f P over sequences of these lengths; tokens with padding[t] = 1 do not exist. */
export function referenceBalancingLoss(
	routing: ReferenceRouting,
	lengths: readonly number[],
	alpha: number,
	padding?: ArrayLike<number>,
): number {
	const experts = routing.normalised[0]!.length;
	const topk = routing.unbiased[0]!.length;
	let begin = 0;
	let loss = 0;
	for (const length of lengths) {
		const counts = new Array<number>(experts).fill(0);
		const sums = new Array<number>(experts).fill(0);
		let tokens = 0;
		for (let t = begin; t < begin + length; t++) {
			if (padding?.[t]) continue;
			tokens++;
			for (const e of routing.unbiased[t]!) counts[e]!++;
			for (const [e, s] of routing.normalised[t]!.entries()) sums[e]! += s;
		}
		begin += length;
		if (tokens === 0) continue;
		const product = counts.reduce((sum, f, e) => sum + f * sums[e]!, 0);
		loss += (alpha * experts * product) / (topk * tokens * tokens * lengths.length);
	}
	return loss;
}
