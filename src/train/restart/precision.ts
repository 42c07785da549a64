/** In which precision a training keeps its moments and sums its gradients, as its checkpoints record it. */
import type { TrainingRecord } from "../../checkpoint/index.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";

export function precisionOf(c: TrainingConfiguration): TrainingRecord["precision"] {
	return { expAvg: c.expAvgDtype, expAvgSq: c.expAvgSqDtype, gradientSums: c.gradReduceInBf16 ? "bf16" : "fp32" };
}

/** Differences of precision between a run and the training whose optimizer it takes over, and their effect: parts of sentences. */
export function precisionChanges(c: TrainingConfiguration, before: TrainingRecord["precision"]): string[] {
	const now = precisionOf(c);
	const moment = (key: string, was: string, is: string) =>
		`${key} ${was}, this run has ${is}: what it holds is ${is === "bf16" ? "rounded to the nearest" : "widened"}`;
	return [
		...(before.expAvg === now.expAvg ? [] : [moment("exp-avg-dtype", before.expAvg, now.expAvg)]),
		...(before.expAvgSq === now.expAvgSq ? [] : [moment("exp-avg-sq-dtype", before.expAvgSq, now.expAvgSq)]),
		...(before.gradientSums === now.gradientSums
			? []
			: [
					`gradients summed in ${before.gradientSums}, this run sums them in ${now.gradientSums} (grad-reduce-in-bf16)`,
				]),
	];
}
