/** Judges a layout's result against the reference, its tolerance and the noise of this machine. */
import { relative } from "../comparison.ts";
import type { Difference, LayoutResult, Unequal } from "./layout-run.ts";
import type { Reference, ReferenceTensor } from "./reference.ts";

/** A comparison in units of the reference's value: its own size for numbers, its root mean square for tensors. */
export interface Judged {
	/** "loss", "gradient norm", a balancing loss, or a parameter's name. */
	readonly name: string;
	readonly error: number;
	readonly noise: number;
	readonly limit: number;
}

export interface Verdict {
	/** Loss, gradient norm, balancing losses. */
	readonly numbers: readonly Judged[];
	/** Gradient of every trainable parameter. */
	readonly gradients: readonly Judged[];
	/** Weights after the optimizer alone. */
	readonly updates: readonly Judged[];
	/** Elements of those that are not the reference's bit for bit. */
	readonly updatesDifferent: number;
	/** Weights after the real steps: shown, not judged. */
	readonly weights: readonly Judged[];
	/** Numbers and gradients whose limit noise has raised above the tolerance. */
	readonly raised: readonly Judged[];
	/** What does not hold, one sentence each. */
	readonly failures: readonly string[];
}

/** Of rounding, three times what this machine shows by itself, as of references (bands.ts). */
const noiseFactor = 3;
/** No noise allows more: sums of fp32 that scatter wider than this are no measure of rounding. */
const widestLimit = 1e-3;

export function judge(result: LayoutResult, reference: Reference, tolerance: number): Verdict {
	const bounded = (name: string, error: number, noise: number): Judged => ({
		name,
		error,
		noise,
		limit: Math.max(tolerance, Math.min(widestLimit, noiseFactor * noise)),
	});
	const noiseOf = (read: (s: Reference["scalars"]) => number | undefined) =>
		reference.noiseFlips > 0 ? 0 : relative(read(reference.noise) ?? 0, read(reference.scalars) ?? 0);
	const number = (name: string, read: (s: Reference["scalars"]) => number | undefined) =>
		bounded(name, relative(read(result.scalars) ?? Number.NaN, read(reference.scalars) ?? 0), noiseOf(read));
	const numbers = [
		number("loss", (s) => s.loss),
		number("gradient norm", (s) => s.gradientNorm),
		...Object.keys(reference.scalars.balancing).map((name) => number(name, (s) => s.balancing[name])),
	];
	const tensors = (kind: keyof LayoutResult["differences"], noise: (tensor: ReferenceTensor) => number) =>
		reference.tensors.map((tensor, at) => {
			const { rms, copies } = result.differences[kind][at]!;
			const size = tensor.rms[kind];
			return bounded(tensor.name, inUnitsOf(size, Math.max(rms, copies)), inUnitsOf(size, noise(tensor)));
		});
	const gradients = tensors("gradient", ({ noise }) => noise);
	const updates = tensors("updated", () => 0);
	const failures = [
		...flipFailures(result),
		...[...numbers, ...gradients.map((judged) => ({ ...judged, name: `the gradient of ${judged.name}` }))]
			.concat(updates.map((judged) => ({ ...judged, name: `${judged.name} after the optimizer alone` })))
			.filter(({ error, limit }) => !(error <= limit))
			.sort((a, b) => b.error / b.limit - a.error / a.limit)
			.map(({ name, error, limit }) => `${name} is off by ${number2(error)} (limit ${number2(limit)})`),
		...unequalFailures("ZeRO-1 changes", result.zero),
		...(result.reordered ? unequalFailures(`${result.reordered.what} change`, result.reordered) : []),
	];
	const { counted, expected } = result.participants;
	if (counted !== expected) failures.unshift(`it counts ${counted} encoder ranks with images instead of ${expected}`);
	if (result.scalars.tokens !== reference.scalars.tokens) {
		failures.unshift(`it counts ${result.scalars.tokens} loss tokens instead of ${reference.scalars.tokens}`);
	}
	return {
		numbers,
		gradients,
		updates,
		updatesDifferent: result.differences.updated.reduce((sum, { different }: Difference) => sum + different, 0),
		weights: tensors("stepped", () => 0),
		raised: [...numbers, ...gradients].filter(({ limit }) => limit > tolerance),
		failures,
	};
}

/** The comparison nearest to, or furthest beyond, its limit. */
export function worst(judged: readonly Judged[]): Judged | undefined {
	return judged.reduce<Judged | undefined>(
		(a, b) => (a === undefined || Number.isNaN(b.error) || b.error / b.limit > a.error / a.limit ? b : a),
		undefined,
	);
}

/** A difference of a tensor of zeros is infinite. */
function inUnitsOf(size: number, difference: number): number {
	return difference === 0 ? 0 : difference / size;
}

function number2(value: number): string {
	return value.toExponential(1);
}

function flipFailures({ flips }: LayoutResult): string[] {
	if (flips.count === 0) return [];
	const first = flips.first.toSorted((a, b) => a.layer - b.layer || a.token - b.token)[0]!;
	const times = flips.count === 1 ? "one routing decision flips" : `${flips.count} routing decisions flip`;
	return [
		`${times}, first in layer ${first.layer}: token ${first.token} of the batch goes to experts ${first.experts.join(", ")} instead of ${first.reference.join(", ")}; differences behind it are real, another seed may have no such tie`,
	];
}

function unequalFailures(change: string, { gradients, weights }: Unequal): string[] {
	const off = (count: number, what: string) => (count === 0 ? [] : [`${change} ${count} elements of ${what}`]);
	return [...off(gradients, "the gradients"), ...off(weights, "the weights")];
}
