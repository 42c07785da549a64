/** The output of `mimo verify`: the reference and its noise, a line for every layout, and the failures. */
import { featuresOf } from "../../data/microbatch.ts";
import { columns } from "../../observe/output.ts";
import { visionModule } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import type { LayoutResult, Unequal } from "./layout-run.ts";
import { type Reference, realSteps, type Scalars } from "./reference.ts";
import type { Subject } from "./subject.ts";
import { type Judged, type Verdict, worst } from "./verdict.ts";

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
