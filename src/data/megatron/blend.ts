/** Blends of indexed data by weight (megatron/core/datasets/blended_*.py, utils.py and helpers.cpp), with numpy's rounding. */
import { UserError } from "../../system/errors.ts";

/** Prefixes of .bin and .idx files. */
export interface Blend {
	readonly prefixes: readonly string[];
	/** null: the blend has each data set once. */
	readonly weights: readonly number[] | null;
}

/** Reads the words of --data-path: prefixes, or weights and prefixes in turn. */
export function parseBlend(words: readonly string[], name: string): Blend {
	const pairs = Array.from({ length: words.length / 2 }, (_, i) => [words[2 * i]!, words[2 * i + 1]!] as const);
	const weights = pairs.map(([weight]) => (weight.trim() === "" ? Number.NaN : Number(weight)));
	if (words.length % 2 === 1 || weights.every(Number.isNaN)) return { prefixes: words, weights: null };
	const wrong = weights.findIndex((weight) => !(weight > 0 && Number.isFinite(weight)));
	if (wrong < 0) return { prefixes: pairs.map(([, prefix]) => prefix), weights };
	throw new UserError(
		`${name}: ${pairs[wrong]![0]} stands before ${pairs[wrong]![1]}, where a weight above 0 is allowed.`,
	);
}

/** numpy's normalisation: values over their sum. */
export function normalised(values: readonly number[]): number[] {
	const sum = numpySum(values);
	return values.map((value) => value / sum);
}

/** numpy.sum of doubles: eight partial sums, and halves of more than 128 values. */
function numpySum(values: readonly number[]): number {
	const { length } = values;
	if (length < 8) return values.reduce((sum, value) => sum + value, 0);
	if (length > 128) {
		const half = Math.floor(length / 2) - (Math.floor(length / 2) % 8);
		return numpySum(values.slice(0, half)) + numpySum(values.slice(half));
	}
	const whole = length - (length % 8);
	const [a, b, c, d, e, f, g, h] = Array.from({ length: 8 }, (_, lane) => {
		let sum = values[lane]!;
		for (let i = lane + 8; i < whole; i += 8) sum += values[i]!;
		return sum;
	}) as [number, number, number, number, number, number, number, number];
	return values.slice(whole).reduce((sum, value) => sum + value, a + b + (c + d) + (e + f + (g + h)));
}

/** Book-ends of train, valid and test, in shares of the data; null: the split is empty. */
export function splitBounds(split: string): readonly (readonly [begin: number, end: number] | null)[] {
	const given = (split.match(/[.0-9]+/g) ?? []).map(Number);
	const total = given.reduce((sum, share) => sum + share, 0);
	if (given.length > 3 || given.some(Number.isNaN) || !(total > 0)) {
		throw new UserError(`--split "${split}" is not up to three weights such as 969,30,1.`);
	}
	const shares = normalised([...given, 0, 0].slice(0, 3));
	let begin = 0;
	return shares.map((share) => {
		const bounds = [begin, begin + share] as const;
		begin = bounds[1];
		return bounds[1] > bounds[0] ? bounds : null;
	});
}

/** Python's round: halves to the even neighbour. */
export function roundHalfToEven(value: number): number {
	const below = Math.floor(value);
	const rest = value - below;
	return rest < 0.5 || (rest === 0.5 && below % 2 === 0) ? below : below + 1;
}

/** Samples to build of every data set for `samples` of a blend: `surplus` is the share of it that is built beyond them. */
export function samplesOfEach(weights: readonly number[], samples: number, surplus: number): number[] {
	return weights.map((weight) => Math.ceil(Math.ceil(samples * weight) * (1 + surplus)));
}

export interface BlendOrder {
	/** Data set of every sample, and which of that data set's samples. */
	readonly sets: Int16Array;
	readonly samples: Uint32Array;
}

/** The data set that lags behind its weight most comes next (build_blending_indices). `weights` sum to 1. */
export function blendBySize(weights: readonly number[], size: number): BlendOrder {
	const order = { sets: new Int16Array(size), samples: new Uint32Array(size) };
	const shares = Float64Array.from(weights);
	const taken = new Float64Array(weights.length);
	for (let i = 0; i < size; i++) {
		const due = Math.max(i, 1);
		let next = 0;
		let most = shares[0]! * due - taken[0]!;
		for (let set = 1; set < shares.length; set++) {
			const lag = shares[set]! * due - taken[set]!;
			if (lag > most) [most, next] = [lag, set];
		}
		order.sets[i] = next;
		order.samples[i] = taken[next]!++;
	}
	return order;
}
