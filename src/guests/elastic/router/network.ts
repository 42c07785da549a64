/**
 * The router: a small network for each axis that turns a budget into probabilities of sizes (docs/spec/elastic.md §3, §4).
 * It runs on the host in float64: it has a few thousand weights, and every mask of a microbatch is known before its first
 * kernel.
 */

import type { Initialisation, ParameterSpec } from "../../../models/parameter-spec.ts";
import { type Axis, type AxisName, rowsOf } from "../axes.ts";
import type { ElasticConfig } from "../config.ts";

const slope = 0.1;
const leastDeviation = 1e-6;

/** Weights of an axis's network: first [width, budgets], second [rows · choices, width], row major. */
export interface GateWeights {
	readonly first: Float64Array;
	readonly second: Float64Array;
}

/** The router's input: a number for every budget, descending. A budget between two is their mixture. */
export function budgetVector(
	budgets: readonly number[],
	{ value, parent }: DrawnBudget,
	options: { readonly extrapolates: boolean },
): Float64Array {
	const vector = new Float64Array(budgets.length);
	const at = budgets.indexOf(value);
	if (at >= 0) vector[at] = 1;
	else if (parent || budgets.length === 1) vector[0] = 1;
	else {
		const below = budgets.findIndex((budget) => budget < value);
		const low = below < 0 ? budgets.length - 1 : Math.max(1, below);
		const weight = (value - budgets[low]!) / (budgets[low - 1]! - budgets[low]!);
		const kept = options.extrapolates ? weight : Math.min(1, Math.max(0, weight));
		vector[low - 1] = kept;
		vector[low] = 1 - kept;
	}
	return vector;
}

export interface DrawnBudget {
	readonly value: number;
	/** The parent's own. */
	readonly parent: boolean;
}

/** A budget in the names of losses. */
export function labelOf(budget: number): string {
	return budget.toFixed(3);
}

/** Budget and noise of a microbatch's sample. */
export interface Draw {
	readonly budget: DrawnBudget;
	/** The sample is one-hot, its gradient that of the probabilities. */
	readonly hard: boolean;
	/** Gumbel noise [rows, choices] of an axis; null: none, and the likeliest choice is taken. */
	readonly noise: ((axis: Axis) => ArrayLike<number>) | null;
}

/** A budget without noise: the likeliest choice of every axis. */
export function withoutNoise(budget: DrawnBudget): Draw {
	return { budget, hard: true, noise: null };
}

/** An axis's part of a sample; matrices are [rows, choices]. */
export interface AxisSample {
	readonly axis: Axis;
	/** After scale and normalisation. */
	readonly scaledLogits: Float64Array;
	/** softmax((scaled logits + noise) / τ). */
	readonly soft: Float64Array;
	/** `soft`, or one-hot at its largest entry. */
	readonly probabilities: Float64Array;
	/** Index of every row's choice. */
	readonly chosen: readonly number[];
	/** Saved for the gradient. */
	readonly saved: {
		readonly input: Float64Array;
		readonly hidden: Float64Array;
		readonly logits: Float64Array;
		readonly scale: number;
		readonly normalised: boolean;
		readonly temperature: number;
		/** The choice is no function of the weights. */
		readonly constant: boolean;
	};
}

export type RouterSample = ReadonlyMap<AxisName, AxisSample>;

/** The factor of the logits in an iteration, from 0. */
function logitScale({ scale }: Pick<ElasticConfig, "scale">, iteration: number): number {
	if (scale === null) return 1;
	const { start, end, iterations } = scale;
	if (iterations <= 1) return start;
	return start + ((end - start) * Math.min(iteration, iterations - 1)) / (iterations - 1);
}

function temperatureAt({ temperature: { initial, decay } }: Pick<ElasticConfig, "temperature">, iteration: number) {
	return initial * decay ** iteration;
}

const neverNormalised: readonly AxisName[] = ["emb", "skip_layer"];

export function sampleAxis(
	config: ElasticConfig,
	axis: Axis,
	weights: GateWeights,
	iteration: number,
	draw: Draw,
): AxisSample {
	const { width, normalise } = config.router;
	const input = budgetVector(config.budgets, draw.budget, { extrapolates: config.compat });
	const rows = rowsOf(axis);
	const choices = axis.sizes.length;
	const hidden = product(weights.first, width, input);
	const logits = product(weights.second, rows * choices, hidden.map(leaky));
	const scale = choices === 1 ? 1 : logitScale(config, iteration);
	const normalised = normalise && choices > 1 && !neverNormalised.includes(axis.name);
	const scaledLogits = logits.map((logit) => scale * logit);
	if (normalised) {
		eachRow(rows, choices, (from, to) => {
			const { deviation } = statistics(logits.subarray(from, to));
			for (let k = from; k < to; k++) scaledLogits[k]! /= Math.max(deviation, leastDeviation);
		});
	}
	const noise = draw.noise?.(axis) ?? null;
	const temperature = noise === null ? 1 : temperatureAt(config, iteration);
	// Megatron has masks of soft samples' chosen sizes, which shrink activations.
	const oneHot = draw.hard || noise === null || !(config.softMask || config.compat);
	const soft = new Float64Array(rows * choices);
	const probabilities = new Float64Array(rows * choices);
	const chosen: number[] = [];
	eachRow(rows, choices, (from, to) => {
		const arguments_ = scaledLogits.subarray(from, to).map((z, k) => (z + (noise?.[from + k] ?? 0)) / temperature);
		soft.set(softmax(arguments_), from);
		const best = largest(soft.subarray(from, to));
		chosen.push(best);
		if (oneHot) probabilities[from + best] = 1;
		else probabilities.set(soft.subarray(from, to), from);
	});
	const saved = { input, hidden, logits, scale, normalised, temperature, constant: noise === null || choices === 1 };
	return { axis, scaledLogits, soft, probabilities, chosen, saved };
}

/** Adds the gradient of an axis's weights for that of its probabilities. */
export function addAxisGradient(
	sample: AxisSample,
	weights: GateWeights,
	dprobabilities: ArrayLike<number>,
	gradient: GateWeights,
): void {
	const { axis, soft, saved } = sample;
	if (saved.constant) return;
	const { input, hidden, logits, scale, normalised, temperature } = saved;
	const [rows, choices] = [rowsOf(axis), axis.sizes.length];
	const dlogits = new Float64Array(rows * choices);
	eachRow(rows, choices, (from, to) => {
		let mean = 0;
		for (let k = from; k < to; k++) mean += dprobabilities[k]! * soft[k]!;
		for (let k = from; k < to; k++) dlogits[k] = (soft[k]! * (dprobabilities[k]! - mean)) / temperature;
		if (normalised) normalisationGradient(dlogits.subarray(from, to), logits.subarray(from, to), scale);
		else for (let k = from; k < to; k++) dlogits[k]! *= scale;
	});
	const dactivated = new Float64Array(hidden.length);
	for (let out = 0; out < dlogits.length; out++) {
		const d = dlogits[out]!;
		for (let j = 0; j < hidden.length; j++) {
			gradient.second[out * hidden.length + j]! += d * leaky(hidden[j]!);
			dactivated[j]! += d * weights.second[out * hidden.length + j]!;
		}
	}
	for (let j = 0; j < hidden.length; j++) {
		const d = dactivated[j]! * (hidden[j]! > 0 ? 1 : slope);
		for (let i = 0; i < input.length; i++) gradient.first[j * input.length + i]! += d * input[i]!;
	}
}

/** dz → dl of z = c l / max(std(l), 1e-6), in place. */
function normalisationGradient(dz: Float64Array, logits: Float64Array, scale: number): void {
	const { mean, deviation } = statistics(logits);
	const n = logits.length;
	if (n === 2 && deviation > leastDeviation) {
		// z is ±c/√2, whatever the logits are; the terms below would leave their rounding.
		dz.fill(0);
		return;
	}
	const divisor = Math.max(deviation, leastDeviation);
	let along = 0;
	for (let k = 0; k < n; k++) along += dz[k]! * logits[k]!;
	for (let k = 0; k < n; k++) {
		const through = deviation > leastDeviation ? (along * (logits[k]! - mean)) / ((n - 1) * deviation ** 3) : 0;
		dz[k] = scale * (dz[k]! / divisor - through);
	}
}

function statistics(values: Float64Array): { readonly mean: number; readonly deviation: number } {
	const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
	const squares = values.reduce((sum, x) => sum + (x - mean) ** 2, 0);
	return { mean, deviation: Math.sqrt(squares / (values.length - 1)) };
}

function leaky(x: number): number {
	return x > 0 ? x : slope * x;
}

/** matrix [rows, x.length] times x. */
function product(matrix: Float64Array, rows: number, x: Float64Array): Float64Array {
	const y = new Float64Array(rows);
	for (let row = 0; row < rows; row++) {
		let sum = 0;
		for (let i = 0; i < x.length; i++) sum += matrix[row * x.length + i]! * x[i]!;
		y[row] = sum;
	}
	return y;
}

function softmax(values: Float64Array): Float64Array {
	const most = Math.max(...values);
	const powers = values.map((x) => Math.exp(x - most));
	const sum = powers.reduce((total, x) => total + x, 0);
	return powers.map((x) => x / sum);
}

/** Index of the largest value, the first of equal ones. */
function largest(values: Float64Array): number {
	return values.reduce((best, x, at) => (x > values[best]! ? at : best), 0);
}

function eachRow(rows: number, choices: number, visit: (from: number, to: number) => void): void {
	for (let row = 0; row < rows; row++) visit(row * choices, (row + 1) * choices);
}

// Parameters of the router: two matrices for each axis, the same on every rank (docs/spec/elastic.md §3, §15).

export const routerPrefix = "elastic_router.";

/** Name of an axis's first (0) or second (2) matrix. */
export function gateName({ name }: Pick<Axis, "name">, layer: 0 | 2): string {
	return `${routerPrefix}gate_${name}.${layer}.weight`;
}

export function routerParameters({ axes, budgets, router }: ElasticConfig): ParameterSpec[] {
	const initialisation: Initialisation = { kind: "normal", standardDeviation: router.standardDeviation };
	const common = { initialisation, shard: { kind: "replicated" }, alwaysF32: true } as const;
	return axes.flatMap((axis) => [
		{ ...common, name: gateName(axis, 0), shape: [router.width, budgets.length] },
		{ ...common, name: gateName(axis, 2), shape: [rowsOf(axis) * axis.sizes.length, router.width] },
	]);
}
