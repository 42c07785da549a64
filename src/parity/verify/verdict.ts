/** Judges a layout's result against the reference, its tolerance and the noise of this machine. */
import type { MlpRecipeName } from "../../native/abi.ts";
import { counted } from "../../system/counted.ts";
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
	/** How products of experts round their operands. */
	readonly recipe: MlpRecipeName;
	/** Loss, gradient norm, balancing losses. */
	readonly numbers: readonly Judged[];
	/** Gradient of every trainable parameter. */
	readonly gradients: readonly Judged[];
	/** Weights after the optimizer alone. */
	readonly updates: readonly Judged[];
	/** Number of weights after the optimizer alone that differ from the reference's in any bit. */
	readonly updatesDifferent: number;
	/** Weights after the real steps: shown, not judged. */
	readonly weights: readonly Judged[];
	/** Numbers and gradients whose limit is above the tolerance because of noise or ties. */
	readonly raised: readonly Judged[];
	/** Failures, one sentence each. */
	readonly failures: readonly string[];
}

/** Limit of an error over the noise of this machine: the factor that references have too (bands.ts). */
const noiseFactor = 3;
/** Least limits of numbers and of tensors beside the tolerance, and the widest that noise allows. */
export interface Limits {
	readonly number: number;
	readonly tensor: number;
	readonly widest: number;
}

/**
 * By how products of experts round. Plain: sums of fp32 that scatter wider than 1e-3 are no measure of rounding. e4m3: of
 * two equally right runs a value beside a tie between two roundings goes either way, which changes it by up to an eighth,
 * and noise shows some ties, not those of the layout.
 */
export const limitsOf: Readonly<Record<MlpRecipeName, Limits>> = {
	plain: { number: 0, tensor: 0, widest: 1e-3 },
	e4m3Blockwise: { number: 1e-3, tensor: 1e-2, widest: 5e-2 },
};

export function judge(result: LayoutResult, reference: Reference, tolerance: number): Verdict {
	const limits = limitsOf[reference.recipe];
	const bounded: Bounded = (name, error, noise, least = 0) => ({
		name,
		error,
		noise,
		limit: Math.max(tolerance, least, Math.min(limits.widest, noiseFactor * noise)),
	});
	const numbers = judgeNumbers(result, reference, bounded, limits.number);
	const gradients = judgeTensors(result, reference, "gradient", (tensor, error) =>
		bounded(tensor.name, error, inUnitsOf(tensor.rms.gradient, tensor.noise), limits.tensor),
	);
	const exact = (tensor: ReferenceTensor, error: number) => bounded(tensor.name, error, 0);
	const updates = judgeTensors(result, reference, "updated", exact);
	return {
		recipe: reference.recipe,
		numbers,
		gradients,
		updates,
		updatesDifferent: result.differences.updated.reduce((sum, { different }: Difference) => sum + different, 0),
		weights: judgeTensors(result, reference, "stepped", exact),
		raised: [...numbers, ...gradients].filter(({ limit }) => limit > tolerance),
		failures: failuresOf(result, reference, { numbers, gradients, updates }),
	};
}

/** A comparison with its limit: the tolerance, `least`, or the noise times a factor, whichever is largest. */
type Bounded = (name: string, error: number, noise: number, least?: number) => Judged;

/** Loss, gradient norm and balancing losses. */
function judgeNumbers(result: LayoutResult, reference: Reference, bounded: Bounded, least: number): Judged[] {
	type Read = (scalars: Reference["scalars"]) => number | undefined;
	const number = (name: string, read: Read) => {
		const right = read(reference.scalars) ?? 0;
		const noise = Math.max(0, ...reference.noise.map((run) => relative(read(run) ?? 0, right)));
		return bounded(name, relative(read(result.scalars) ?? Number.NaN, right), noise, least);
	};
	return [
		number("loss", (s) => s.loss),
		number("gradient norm", (s) => s.gradientNorm),
		...Object.keys(reference.scalars.balancing).map((name) => number(name, (s) => s.balancing[name])),
	];
}

/** Every tensor's error in units of the reference's root mean square. */
function judgeTensors(
	result: LayoutResult,
	reference: Reference,
	kind: keyof LayoutResult["differences"],
	judged: (tensor: ReferenceTensor, error: number) => Judged,
): Judged[] {
	return reference.tensors.map((tensor, at) => {
		const { rms, copies } = result.differences[kind][at]!;
		return judged(tensor, inUnitsOf(tensor.rms[kind], Math.max(rms, copies)));
	});
}

function failuresOf(
	result: LayoutResult,
	reference: Reference,
	{ numbers, gradients, updates }: Pick<Verdict, "numbers" | "gradients" | "updates">,
): string[] {
	const compared = [
		...numbers,
		...gradients.map((judged) => ({ ...judged, name: `the gradient of ${judged.name}` })),
		...updates.map((judged) => ({ ...judged, name: `${judged.name} after the optimizer alone` })),
	];
	return [
		...countFailures(result, reference),
		...flipFailures(result),
		...compared
			.filter(({ error, limit }) => !(error <= limit))
			.sort((a, b) => b.error / b.limit - a.error / a.limit)
			.map(({ name, error, limit }) => `${name} is off by ${number2(error)} (limit ${number2(limit)})`),
		...unequalFailures("ZeRO-1 changes", result.zero),
		...(result.reordered ? unequalFailures(`${result.reordered.what} change`, result.reordered) : []),
	];
}

/** Wrong numbers of loss tokens, and of encoder ranks with images. */
function countFailures({ scalars, participants }: LayoutResult, reference: Reference): string[] {
	const failures: string[] = [];
	const { tokens } = reference.scalars;
	if (scalars.tokens !== tokens)
		failures.push(`it counts ${counted(scalars.tokens, "loss token")} instead of ${tokens}`);
	const { counted: voted, expected } = participants;
	if (voted !== expected)
		failures.push(`it counts ${counted(voted, "encoder rank")} with images instead of ${expected}`);
	return failures;
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
	const off = (count: number, what: string) =>
		count === 0 ? [] : [`${change} ${counted(count, "element")} of ${what}`];
	return [...off(gradients, "the gradients"), ...off(weights, "the weights")];
}
