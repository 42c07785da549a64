/** Judges a layout's result against the reference, its tolerance and the noise of this machine. */

import { featuresOf } from "../../data/microbatch.ts";
import { columns } from "../../observe/output.ts";
import { visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { relative } from "../comparison.ts";
import type { Difference, LayoutResult, Unequal } from "./layout-run.ts";
import { type Reference, type ReferenceTensor, realSteps, type Scalars } from "./reference.ts";
import type { Subject } from "./subject.ts";

/** A comparison in units of the reference's value: its own size for numbers, its root mean square for tensors. */
export interface Judged {
	/** "loss", "gradient norm", a balancing loss, or a parameter's name. */
	readonly name: string;
	readonly error: number;
	readonly noise: number;
	readonly limit: number;
}

export interface Verdict {
	/** Losses, gradient norm, balancing losses. */
	readonly numbers: readonly Judged[];
	/** Values that experts round to e4m3, before the reference's take their place. */
	readonly operands: readonly Judged[];
	/** Gradient of every trainable parameter. */
	readonly gradients: readonly Judged[];
	/** Weights after the optimizer alone. */
	readonly updates: readonly Judged[];
	/** Number of weights after the optimizer alone that differ from the reference's in any bit. */
	readonly updatesDifferent: number;
	/** Weights after the real steps: shown, not judged. */
	readonly weights: readonly Judged[];
	/** Numbers, operands and gradients whose limit is above the tolerance because of noise. */
	readonly raised: readonly Judged[];
	/** Values beside a tie or an edge that rounding moved across it, one sentence each. */
	readonly ties: readonly string[];
	/** Failures, one sentence each. */
	readonly failures: readonly string[];
}

/** Limit of an error over the noise of this machine: the factor that references have too (bands.ts). */
const noiseFactor = 3;
/** The widest limit that noise allows: sums of fp32 that scatter wider are no measure of rounding. */
const widest = 1e-4;

export function judge(result: LayoutResult, reference: Reference, tolerance: number): Verdict {
	const bounded: Bounded = (name, error, noise) => ({
		name,
		error,
		noise,
		limit: Math.max(tolerance, Math.min(widest, noiseFactor * noise)),
	});
	const numbers = judgeNumbers(result, reference, bounded);
	const operands = reference.operands.map(({ name, noise }, at) =>
		bounded(name, result.operands?.errors[at] ?? Number.NaN, noise),
	);
	const gradients = judgeTensors(result, reference, "gradient", (tensor, error) =>
		bounded(tensor.name, error, inUnitsOf(tensor.rms.gradient, tensor.noise)),
	);
	const exact = (tensor: ReferenceTensor, error: number) => bounded(tensor.name, error, 0);
	const updates = judgeTensors(result, reference, "updated", exact);
	return {
		numbers,
		operands,
		gradients,
		updates,
		updatesDifferent: result.differences.updated.reduce((sum, { different }: Difference) => sum + different, 0),
		weights: judgeTensors(result, reference, "stepped", exact),
		raised: [...numbers, ...operands, ...gradients].filter(({ limit }) => limit > tolerance),
		ties: tiesOf(result, reference),
		failures: failuresOf(result, reference, { numbers, operands, gradients, updates }),
	};
}

/** A comparison with its limit: the tolerance, or the noise times a factor, whichever is larger. */
type Bounded = (name: string, error: number, noise: number) => Judged;

/** Losses, gradient norm and balancing losses. */
function judgeNumbers(result: LayoutResult, reference: Reference, bounded: Bounded): Judged[] {
	type Read = (scalars: Reference["scalars"]) => number | undefined;
	const number = (name: string, read: Read) => {
		const right = read(reference.scalars) ?? 0;
		const noise = Math.max(0, ...reference.noise.map((run) => relative(read(run) ?? 0, right)));
		return bounded(name, relative(read(result.scalars) ?? Number.NaN, right), noise);
	};
	const names = (of: "losses" | "balancing") =>
		new Set([...Object.keys(reference.scalars[of]), ...Object.keys(result.scalars[of])]);
	return [
		number("loss", (s) => s.loss),
		number("gradient norm", (s) => s.gradientNorm),
		...[...names("losses")].map((name) => number(name, (s) => s.losses[name])),
		...[...names("balancing")].map((name) => number(name, (s) => s.balancing[name])),
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
	{ numbers, operands, gradients, updates }: Pick<Verdict, "numbers" | "operands" | "gradients" | "updates">,
): string[] {
	const compared = [
		...numbers,
		...operands,
		...gradients.map((judged) => ({ ...judged, name: `the gradient of ${judged.name}` })),
		...updates.map((judged) => ({ ...judged, name: `${judged.name} after the optimizer alone` })),
	];
	return [
		...countFailures(result, reference),
		...flipFailures(result),
		...compared
			.filter(({ error, limit }) => !(error <= limit))
			.sort((a, b) => b.error / b.limit - a.error / a.limit)
			.map(offBy),
		...unequalFailures("ZeRO-1 changes", result.zero),
		...(result.reordered ? unequalFailures(`${result.reordered.what} change`, result.reordered) : []),
	];
}

function offBy({ name, error, limit, noise }: Judged): string {
	const cancels =
		error <= noiseFactor * noise ? `; rounding alone changes it by ${number2(noise)}: its terms cancel` : "";
	return `${name} is off by ${number2(error)} (limit ${number2(limit)})${cancels}`;
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

/** Values beside a tie between two e4m3 numbers, and at a clamp's edge. */
function tiesOf({ operands, clampFlips }: LayoutResult, { clamp }: Reference): string[] {
	const sentences: string[] = [];
	const tie = operands?.ties.first[0];
	if (tie) {
		const { count } = operands!.ties;
		sentences.push(
			`${count === 1 ? "one value rounds" : `${count} values round`} to another e4m3 number than the reference's, such as column ${tie.column} of token ${tie.token} of the batch of ${tie.operand}; the experts are given the reference's`,
		);
	}
	if (clampFlips.first !== null) {
		const { place, half, channel, distance } = clampFlips.first;
		const values = clampFlips.count === 1 ? "one value falls" : `${clampFlips.count} values fall`;
		sentences.push(
			`${values} on the other side of activation-func-clamp-value ${clamp}, first in ${place}: channel ${channel} of the ${half}, ${number2(distance)} from it; differences of gradients behind it are real, another seed may have no such value`,
		);
	}
	return sentences;
}

function unequalFailures(change: string, { gradients, weights }: Unequal): string[] {
	const off = (count: number, what: string) =>
		count === 0 ? [] : [`${change} ${counted(count, "element")} of ${what}`];
	return [...off(gradients, "the gradients"), ...off(weights, "the weights")];
}

// The output of `mimo verify`: the reference and its noise, a line for every layout, and the failures.

export interface LayoutReport {
	readonly layout: string;
	readonly microBatchSize: number;
	readonly microbatches: number;
	/** null: the run itself failed. */
	readonly result: LayoutResult | null;
	readonly verdict: Verdict | null;
	/** Failures, one sentence each. */
	readonly failures: readonly string[];
}

const short = (value: number) => (value === 0 ? "0" : value.toExponential(1));

export function renderReference(subject: Subject, reference: Reference): string {
	const { samples } = subject;
	const textOnly = samples.filter((sample) => featuresOf(sample, visionModule).grids.length === 0).length;
	const { scalars, noise } = reference;
	const rows = samples
		.map(({ text }) => text.ids.filter((id) => id === subject.encoders[0]?.placeholderId).length)
		.filter((count) => count > 0);
	const others = rows.length === 0 ? "" : `, the others with ${Math.min(...rows)} to ${Math.max(...rows)} image rows`;
	const lines = [
		`Reference: layout 1, one process${subject.encoders.length > 0 ? " with both modules" : ""}. ${counted(samples.length, "sample")} of ${counted(subject.sequenceLength, "token")} ${subject.origin}${subject.encoders.length > 0 ? `, ${textOnly} of them text alone${others}` : ""}.`,
		`  loss ${scalars.loss.toFixed(6)}, gradient norm ${scalars.gradientNorm.toFixed(6)}, ${counted(scalars.tokens, "loss token")}, ${reference.microbatches} × ${counted(reference.microBatchSize, "sample")} a step`,
	];
	if (reference.recipe === "e4m3Blockwise") {
		lines.push(
			"  experts round to e4m3: layouts give them the reference's input, routing weights and gradients after comparing their own, so that a tie between two roundings changes nothing behind it",
		);
	}
	const flips = `rounding otherwise flips ${counted(reference.noiseFlips, "decision")} of routers or clamps (near ties)`;
	if (noise.length === 0) {
		lines.push(`  no measure of this machine's noise: ${flips}; the tolerance alone counts`);
		return lines.join("\n");
	}
	const loudest = reference.tensors.reduce((a, b) => (noiseOf(b) > noiseOf(a) ? b : a));
	const change = (read: (run: Scalars) => number) =>
		short(Math.max(...noise.map((run) => Math.abs(read(run) / read(scalars) - 1))));
	lines.push(
		`  noise of this machine (every weight moved by a rounding, the last microbatch first; largest of ${counted(noise.length, "run")}): loss ${change((run) => run.loss)}, gradient norm ${change((run) => run.gradientNorm)}, worst gradient ${short(noiseOf(loudest))} (${loudest.name})`,
	);
	if (reference.noiseFlips > 0) lines.push(`  in other runs ${flips}; they are no measure of noise`);
	return lines.join("\n");
}

function noiseOf({ rms, noise }: Reference["tensors"][number]): number {
	return noise === 0 ? 0 : noise / rms.gradient;
}

/** The table and, under it, why layouts fail. Errors are relative to the reference, its root mean square for tensors. */
export function renderLayouts(reports: readonly LayoutReport[]): string {
	const lines = [
		...layoutTable(reports),
		`(weights after ${realSteps} real steps are shown, not judged: Adam turns the rounding of zero gradients into full steps)`,
	];
	for (const { layout, verdict } of reports) {
		if (verdict !== null && verdict.raised.length > 0) lines.push(raisedLimits(layout, verdict));
	}
	for (const { layout, verdict } of reports) for (const tie of verdict?.ties ?? []) lines.push(`${layout}: ${tie}.`);
	for (const { layout, failures } of reports) {
		const shown = failures.slice(0, 5);
		for (const failure of shown) lines.push(`${layout}: ${failure}.`);
		if (failures.length > shown.length) lines.push(`${layout}: and ${failures.length - shown.length} more.`);
	}
	return [...lines, conclusion(reports)].join("\n");
}

function layoutTable(reports: readonly LayoutReport[]): string[] {
	// Where a layout also ran with another order of work, a column compares the two.
	const what = reports.find(({ result }) => result?.reordered)?.result?.reordered?.what;
	const reordered = what
		? [{ "late weight gradients": "late = immediate", "passes in turns": "in turns = apart" }[what]]
		: [];
	const header = [
		"layout",
		"step",
		"loss",
		"gradient norm",
		"worst gradient",
		"noise",
		"limit",
		"optimizer alone",
		"ZeRO-1 on = off",
		...reordered,
		"weights after a step",
		"",
		"worst gradient's parameter",
	];
	return columns([header, ...reports.map((report) => layoutRow(report, header.length))]);
}

function layoutRow(report: LayoutReport, cells: number): string[] {
	const { layout, microBatchSize, microbatches, result, verdict, failures } = report;
	const step = `${microbatches} × ${microBatchSize}`;
	if (verdict === null || result === null)
		return [layout, step, ...new Array<string>(cells - 4).fill(""), "FAILED", ""];
	const bitwise = ({ weights, gradients }: Unequal) => (weights + gradients === 0 ? "bitwise" : "NO");
	const gradient = worst(verdict.gradients);
	return [
		layout,
		step,
		short(verdict.numbers[0]!.error),
		short(verdict.numbers[1]!.error),
		short(gradient?.error ?? 0),
		short(gradient?.noise ?? 0),
		short(gradient?.limit ?? 0),
		verdict.updatesDifferent === 0 ? "bitwise equal" : short(worst(verdict.updates)?.error ?? 0),
		bitwise(result.zero),
		...(result.reordered ? [bitwise(result.reordered)] : []),
		short(largest(verdict.weights)),
		failures.length === 0 ? "ok" : "FAILED",
		gradient && gradient.error > 0 ? gradient.name : "",
	];
}

function conclusion(reports: readonly LayoutReport[]): string {
	const failed = reports.filter(({ failures }) => failures.length > 0).map(({ layout }) => layout);
	if (failed.length > 0) return `FAILED: ${failed.join(", ")}.`;
	return reports.length === 1
		? "The layout gives what one process gives."
		: `All ${reports.length} layouts give what one process gives.`;
}

function raisedLimits(layout: string, { raised, numbers, operands, gradients }: Verdict): string {
	const widest = raised.reduce((a, b) => (b.limit > a.limit ? b : a));
	const limits = numbers.length + operands.length + gradients.length;
	return `${layout}: noise raises ${raised.length} of ${limits} limits above the tolerance, at most to ${short(widest.limit)} (${widest.name}).`;
}

function largest(judged: readonly Judged[]): number {
	return judged.reduce((most, { error }) => Math.max(most, error), 0);
}

/** Everything, for programs. */
export function reportJson(reference: Reference, reports: readonly LayoutReport[]): string {
	const passed = reports.every(({ failures }) => failures.length === 0);
	return JSON.stringify({ reference, layouts: reports, passed }, null, 2);
}
