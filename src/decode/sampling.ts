/** Samples the next token from logits: greedy, or by temperature, top-k and top-p. */
import { philoxKey } from "../models/initialise.ts";
import { Distribution } from "../native/abi.ts";
import type { Device } from "../native/device.ts";
import { UserError } from "../system/errors.ts";
import { Tensor } from "../tensor/index.ts";

export interface SamplingOptions {
	/** Divides the logits; 0: greedy. */
	readonly temperature: number;
	/** Number of likeliest tokens to sample from, and any as likely as the last of them; null: all. */
	readonly topK: number | null;
	/** Nucleus sampling (Holtzman et al., 2020): the fewest likeliest tokens whose probabilities sum to at least this; 1: all. */
	readonly topP: number;
	readonly seed: number;
}

export const greedy: SamplingOptions = { temperature: 0, topK: null, topP: 1, seed: 0 };

/**
 * The random numbers that choose tokens 0 … count − 1 of sequence `sequence` of a run: Philox keyed by the seed and the
 * sequence, counted by token, so that neither layout nor batch changes them. Uniform in [0, 1).
 */
export function uniformsOf(device: Device, seed: number, sequence: number, count: number): Float32Array {
	using y = Tensor.empty(device, [1, count], "f32", "workspace");
	device.run("philox_fill", {
		y,
		rows: 1,
		width: count,
		first_row: 0,
		first_column: 0,
		full_width: count,
		seed: philoxKey(seed, `sequence.${sequence}`),
		a: 0,
		b: 1,
		distribution: Distribution.uniform,
		dtype: y.dtypeCode,
	});
	return y.toFloat32();
}

/** Chooses a token; `uniform` in [0, 1) decides the draw. */
export function choose(logits: Float32Array, options: SamplingOptions, uniform: number): number {
	const best = likeliest(logits);
	const highest = logits[best]!;
	if (!Number.isFinite(highest)) {
		throw new UserError(`The model's largest logit is ${highest}: its weights, or its input, are not finite.`);
	}
	return options.temperature === 0 ? best : draw(logits, highest, options, uniform);
}

/** Index of the largest value; the lowest index of equal values. */
function likeliest(logits: Float32Array): number {
	let best = 0;
	for (let id = 1; id < logits.length; id++) if (logits[id]! > logits[best]!) best = id;
	return best;
}

/**
 * A token of softmax(logits / temperature) among the topK likeliest and, of those, the fewest likeliest that reach topP. The
 * kept tokens lie side by side in the order of their ids.
 */
function draw(
	logits: Float32Array,
	highest: number,
	{ temperature, topK, topP }: SamplingOptions,
	uniform: number,
): number {
	const weights = Float64Array.from(logits, (logit) => Math.exp((logit - highest) / temperature));
	const lowest = lowestKept(weights, topK, topP);
	let total = 0;
	for (const weight of weights) if (weight >= lowest) total += weight;
	let left = uniform * total;
	let last = 0;
	for (const [id, weight] of weights.entries()) {
		if (weight < lowest) continue;
		last = id;
		left -= weight;
		if (left < 0) break;
	}
	return last;
}

/** Smallest weight that is kept by topK and topP. */
function lowestKept(weights: Float64Array, topK: number | null, topP: number): number {
	if ((topK === null || topK >= weights.length) && topP >= 1) return 0;
	const among = topK === null ? withoutTail(weights, topP) : largest(weights, topK);
	const total = topK === null ? sum(weights) : sum(among);
	let kept = among.length - 1;
	let reached = among[kept]!;
	while (kept > 0 && reached < topP * total) reached += among[--kept]!;
	return among[kept]!;
}

/** Ascending, without weights so small that all of them together are less than what topP leaves out. */
function withoutTail(weights: Float64Array, topP: number): Float64Array {
	const least = ((1 - topP) * sum(weights)) / weights.length;
	return weights.filter((weight) => weight >= least).sort();
}

/** The `count` largest, ascending. */
function largest(weights: Float64Array, count: number): Float64Array {
	const room = new Float64Array(2 * count);
	let [used, least] = [0, -1];
	for (const weight of weights) {
		if (weight <= least) continue;
		room[used++] = weight;
		if (used < room.length) continue;
		room.sort();
		room.copyWithin(0, count);
		used = count;
		least = room[0]!;
	}
	return room
		.subarray(0, used)
		.sort()
		.subarray(Math.max(0, used - count));
}

function sum(values: Float64Array): number {
	let total = 0;
	for (const value of values) total += value;
	return total;
}
