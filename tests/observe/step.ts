/** A step report for tests: all fields are fixed except the given ones. */
import type { StepReport } from "../../src/observe/step-report.ts";

export function step(report: Partial<StepReport> & { readonly iteration: number }): StepReport {
	return {
		consumedSamples: 8 * report.iteration,
		skippedSamples: 0,
		globalBatchSize: 8,
		tokens: 2048,
		seconds: 0.5,
		learningRate: 2e-4,
		nextLearningRate: 1.951546e-4,
		losses: { "lm loss": 12 },
		lossScale: 1,
		gradNorm: 5.6161,
		numZeros: null,
		paramsNorm: null,
		skipped: false,
		participation: null,
		...report,
	};
}
