/**
 * A bf16 run beside an fp32 reference: rounding moves every value by about 2^-9, so only what training is judged by is
 * compared, the losses.
 */
import { counted } from "../system/counted.ts";
import { type Check, type ParityReport, relative } from "./comparison.ts";

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
