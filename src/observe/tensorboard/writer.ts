/**
 * Writes TensorBoard events with Megatron's scalar names (docs/spec/runtime.md §6.3), each over steps and, as "NAME vs samples", over
 * consumed samples. Scalars that Megatron lacks (modules, memory by rank) are only over steps.
 */

import { type Scalar, type ScalarOptions, Scalars } from "../scalars.ts";
import type { EvaluationReport, Observer, StepReport, TimersReport } from "../step-report.ts";
import { EventFile, type Histogram } from "./event-file.ts";

export class TensorBoard implements Observer {
	readonly #events: EventFile;
	readonly #scalars: Scalars;

	constructor(options: ScalarOptions & { readonly folder: string }) {
		this.#events = new EventFile(options.folder);
		this.#scalars = new Scalars(options);
	}

	step(report: StepReport): void {
		const scalars = this.#scalars.step(report);
		if (scalars === null) return;
		const { twinned, alone } = scalars;
		this.#events.write(report.iteration, [...twinned, ...alone, ...peakScalars(report)], expertHistograms(report));
		this.#writeTwins(report.consumedSamples, twinned);
	}

	evaluation(report: EvaluationReport): void {
		const scalars = this.#scalars.evaluation(report);
		this.#events.write(report.iteration, scalars);
		if (report.consumedSamples !== undefined) this.#writeTwins(report.consumedSamples, scalars);
	}

	timers(report: TimersReport): void {
		const scalars = this.#scalars.timers(report);
		if (scalars.length > 0) this.#events.write(report.iteration, scalars);
	}

	note(): void {}

	close(): void {
		this.#events.close();
	}

	#writeTwins(samples: number, scalars: readonly Scalar[]): void {
		this.#events.write(
			samples,
			scalars.map(([name, value]): Scalar => [`${name} vs samples`, value]),
		);
	}
}

/** Peak memory of every rank. */
function* peakScalars({ memory }: StepReport): Generator<Scalar> {
	for (const [rank, { peak }] of (memory ?? []).entries()) yield [`memory/rank_${rank}_peak-bytes`, peak];
}

/** Histograms of tokens by expert, where bucket e is expert e. */
function* expertHistograms({ tokensPerExpert }: StepReport): Generator<readonly [string, Histogram]> {
	for (const [layer, counts] of tokensPerExpert ?? []) {
		yield [`moe/tokens_per_expert_layer_${layer}`, { limits: counts.map((_, expert) => expert + 1), counts }];
	}
}
