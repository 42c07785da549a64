/** The checks of a parity run, its verdict, and their display. */

import { join } from "node:path";
import type * as v from "valibot";
import { columns } from "../observe/output.ts";
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { configurationHas, readReferenceJson } from "./golden-fields.ts";

export interface Check {
	/** Name, such as "step 1 layer 3 rms" or "step 12 loss". */
	readonly name: string;
	readonly expected: number;
	readonly actual: number;
	/** Difference in the unit of `limit`: relative to the reference. */
	readonly error: number;
	readonly limit: number;
}

/** Whether a check holds; NaN never does. */
export function holds({ error, limit }: Check): boolean {
	return error <= limit;
}

/** Relative difference of two numbers. */
export function relative(actual: number, expected: number): number {
	return Math.abs(actual - expected) / Math.max(Math.abs(expected), 1e-12);
}

export interface ParityReport {
	readonly folder: string;
	readonly checks: readonly Check[];
	/** Near ties in routing that were decided as in the reference. */
	readonly ties?: readonly string[];
	/** Others that do not explain the first difference, and how many were not tried because that would take too long. */
	readonly search?: { readonly tried: number; readonly untried: number };
}

/** The first check that does not hold, in the order the model computes. */
export function firstFailure(report: ParityReport): Check | undefined {
	return report.checks.find((check) => !holds(check));
}

/** A table for people: every failed check, the worst of each kind, and the verdict. */
export function renderReport(report: ParityReport): string {
	const kinds = Map.groupBy(report.checks, (check) => kindOf(check.name));
	const rows = [...kinds].map(([kind, checks]) => {
		const worst = checks.reduce((a, b) => (b.error / b.limit > a.error / a.limit || Number.isNaN(b.error) ? b : a));
		const failed = checks.filter((check) => !holds(check)).length;
		return [
			kind,
			String(checks.length),
			worst.error.toExponential(1),
			worst.limit.toExponential(1),
			worst.name,
			failed === 0 ? "ok" : `${failed} off`,
		];
	});
	const header = ["compared", "count", "worst", "limit", "where", ""];
	const lines = columns([header, ...rows]);
	for (const tie of report.ties ?? []) lines.push(`Routed as the reference where rounding decides: ${tie}.`);
	const { tried = 0, untried = 0 } = report.search ?? {};
	if (tried > 0) {
		const more = untried > 0 ? `, ${untried} more were not tried` : "";
		lines.push(
			`No routing decision explains the first difference: ${tried} that rounding may have made ${tried === 1 ? "was" : "were"} taken the other way${more}.`,
		);
	}
	const failure = firstFailure(report);
	lines.push(
		failure
			? `${report.folder}: FAILED, first at ${failure.name}: ${failure.actual} instead of ${failure.expected}, off by ${failure.error.toExponential(2)} (limit ${failure.limit.toExponential(1)}).`
			: `${report.folder}: all ${report.checks.length} values agree.`,
	);
	return lines.join("\n");
}

/** "step 12 loss" → "loss"; "step 1 layer 3 rms" → "layer rms". */
function kindOf(name: string): string {
	if (name.includes("gradient of")) return "parameter gradients";
	return name
		.replace(/^step \d+ /, "")
		.replace(/ ?\d+/g, "")
		.trim();
}

// A bf16 run beside an fp32 reference: rounding moves every value by about 2^-9, so only what training is judged by
// is compared, the losses.

/** Type in which parameters and activations are stored and multiplied; master weights and sums stay fp32. */
export type Precision = "f32" | "bf16";

const comparedSteps = 10;
const stepLimit = 0.01;
const meanLimit = 0.005;

/** The first ten losses within 1 %, the mean of all within 0.5 %. */
export function bf16Report(report: ParityReport): ParityReport {
	const losses = report.checks.filter(({ name }) => /^step \d+ loss$/.test(name));
	const first = losses.slice(0, comparedSteps).map((check) => ({ ...check, limit: stepLimit }));
	return { ...report, checks: [...first, meanLoss(losses)] };
}

function meanLoss(losses: readonly Check[]): Check {
	const mean = (of: "expected" | "actual") => losses.reduce((sum, check) => sum + check[of], 0) / losses.length;
	const [expected, actual] = [mean("expected"), mean("actual")];
	return {
		name: `mean loss of ${counted(losses.length, "step")}`,
		expected,
		actual,
		error: relative(actual, expected),
		limit: meanLimit,
	};
}

// Tolerances of losses and norms against a reference. A band is the largest relative difference seen so far between the reference
// and other correct runs; three bands are allowed, and at least a few roundings of fp32.

type Banded = "loss" | "grad_norm" | "seq_load_balancing_loss";

interface Bounds {
	/** Allowed where the band is smaller. */
	readonly least: number;
	/** Largest band of the reference's exact steps: rounding alone, before a routing decision flips. */
	readonly exact: number;
	/** Largest band of later steps, whose trajectories have parted. */
	readonly parted: number;
}

const bounds: Readonly<Record<Banded, Bounds>> = {
	loss: { least: 2e-6, exact: 1e-6, parted: 0.02 },
	grad_norm: { least: 1e-5, exact: 2e-5, parted: 0.5 },
	seq_load_balancing_loss: { least: 1e-5, exact: 1e-5, parted: 0.5 },
};

/** Largest relative difference from the reference's value. */
export function bandLimit(quantity: Banded, band: number): number {
	return Math.max(bounds[quantity].least, 3 * band);
}

type BandedSteps = readonly { readonly [Key in `${Banded}_band`]?: number | undefined }[];

/** The two files of a reference folder, as a format reads them. */
interface ReferenceFiles<Config, Golden> {
	readonly config: Config;
	readonly golden: Golden;
}

/** A format of reference folders whose golden.json has bands. */
export class BandedFormat<Config, Golden extends { readonly exact_steps: number; readonly steps: BandedSteps }> {
	/** `key`: stands in config.json of this format's folders alone. */
	constructor(
		private readonly key: string,
		private readonly schemas: ReferenceFiles<v.GenericSchema<unknown, Config>, v.GenericSchema<unknown, Golden>>,
	) {}

	/** Whether a folder is a reference in this format. */
	holds(folder: string): boolean {
		return configurationHas(folder, this.key);
	}

	/** Reads and checks both files and the bands; the error names the file and the field. */
	read(folder: string): ReferenceFiles<Config, Golden> {
		const config = readReferenceJson(this.schemas.config, join(folder, "config.json"));
		const path = join(folder, "golden.json");
		const golden = readReferenceJson(this.schemas.golden, path);
		requireBands(path, golden.exact_steps, golden.steps);
		return { config, golden };
	}
}

/**
 * Throws a UserError for a band that would let a wrong run pass. `exactSteps`: steps before the first flipped decision.
 * `exactGradNorm`: largest band of their gradient norms.
 */
export function requireBands(
	path: string,
	exactSteps: number,
	steps: BandedSteps,
	{ exactGradNorm = bounds.grad_norm.exact }: { readonly exactGradNorm?: number } = {},
): void {
	if (!Number.isInteger(exactSteps) || exactSteps < 0 || exactSteps > steps.length) {
		throw new UserError(`${path}: exact_steps is ${exactSteps}; allowed is a whole number from 0 to ${steps.length}.`);
	}
	for (const [index, step] of steps.entries()) {
		for (const [quantity, { exact, parted }] of Object.entries(bounds) as [Banded, Bounds][]) {
			const band = step[`${quantity}_band`];
			if (band === undefined) continue;
			const rounding = quantity === "grad_norm" ? exactGradNorm : exact;
			const largest = index < exactSteps ? rounding : parted;
			if (band >= 0 && band <= largest) continue;
			const which = index < exactSteps ? `one of the ${exactSteps} exact steps` : "past the exact steps";
			throw new UserError(
				`${path}: ${quantity}_band of step ${index + 1} is ${band}; allowed is 0 to ${largest}, ${which}.`,
			);
		}
	}
}
