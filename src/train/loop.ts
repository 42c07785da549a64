/** The training loop: schedule → data → step → log, with evaluations in between. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { type Microbatch, nextTokenMicrobatch } from "../data/microbatch.ts";
import type { TokenSource } from "../data/text/token-source.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import { debug } from "../native/debug.ts";
import { UserError } from "../native/errors.ts";
import type { Observer } from "../observe/report.ts";
import { learningRateAt, schedulesOf, weightDecayAt } from "../optim/schedules.ts";
import type { World } from "../parallel/world.ts";
import { evaluate } from "./evaluate.ts";
import type { LanguageRun } from "./language-run.ts";
import { describeNonFinite } from "./non-finite.ts";
import type { Sources } from "./sources.ts";
import { type StepResult, trainStep } from "./step.ts";

export interface TrainingSummary {
	readonly steps: number;
	readonly firstLoss: number;
	readonly lastLoss: number;
	readonly tokens: number;
	/** Of the steps alone. */
	readonly seconds: number;
	/** Held-out loss of a token at the end; null without validation data. */
	readonly heldOutLoss: number | null;
}

export function trainingLoop(
	c: TrainingConfiguration,
	run: LanguageRun,
	world: World,
	sources: Sources,
	observer: Observer,
): TrainingSummary {
	const { model, state, lane, lanes } = run;
	const { learningRate, weightDecay } = schedulesOf(c);
	const iterations = c.trainIters ?? Math.floor(c.trainSamples! / c.globalBatchSize);
	const laneSamples = c.globalBatchSize / lanes;
	let scheduledSamples = 0;
	let firstLoss = Number.NaN;
	let lastLoss = Number.NaN;
	let tokens = 0;
	let seconds = 0;
	for (let iteration = 1; iteration <= iterations; iteration++) {
		const started = performance.now();
		const firstSample = (iteration - 1) * c.globalBatchSize + lane * laneSamples;
		const batch = batchOf(sources.training, firstSample, c.microBatchSize, laneSamples / c.microBatchSize);
		const rate = learningRateAt(learningRate, scheduledSamples);
		const result = trainStep(state, {
			microbatches: batch,
			firstToken: lane * laneSamples * c.seqLength,
			iteration: iteration - 1,
			learningRate: rate,
			weightDecay: weightDecayAt(weightDecay, scheduledSamples),
		});
		if (c.checkForNanInLossAndGrad) requireFinite(model, batch, iteration, result);
		world.progress(iteration);
		if (result.updated) scheduledSamples += c.globalBatchSize;
		const stepSeconds = (performance.now() - started) / 1000;
		debug(2, `step ${iteration}: loss ${result.loss}, ${stepSeconds.toFixed(3)} s`);
		seconds += stepSeconds;
		tokens += result.tokens;
		if (iteration === 1) firstLoss = result.loss;
		lastLoss = result.loss;
		observer.step({
			iteration,
			consumedSamples: iteration * c.globalBatchSize,
			skippedSamples: 0,
			globalBatchSize: c.globalBatchSize,
			tokens: result.tokens,
			seconds: stepSeconds,
			learningRate: rate,
			nextLearningRate: learningRateAt(learningRate, scheduledSamples),
			losses: { "lm loss": result.loss, ...result.balancing },
			lossScale: 1,
			gradNorm: result.updated ? result.gradientNorm : null,
			numZeros: result.zeroGradients,
			paramsNorm: result.parametersNorm,
			skipped: !result.updated,
		});
		if (c.evalIters > 0 && iteration % c.evalInterval === 0 && sources.validation) {
			const loss = evaluateOn(run, sources.validation, c, c.evalIters);
			observer.evaluation({
				iteration,
				consumedSamples: iteration * c.globalBatchSize,
				split: "validation",
				label: `iteration ${iteration}`,
				losses: { "lm loss": loss },
			});
		}
	}
	const heldOutLoss = sources.validation ? evaluateOn(run, sources.validation, c, null) : null;
	return { steps: iterations, firstLoss, lastLoss, tokens, seconds, heldOutLoss };
}

/** The microbatches of one step: consecutive samples from `firstSample` on. */
function batchOf(source: TokenSource, firstSample: number, size: number, count: number): Microbatch[] {
	return Array.from({ length: count }, (_, index) =>
		nextTokenMicrobatch(Array.from({ length: size }, (_, row) => source.sample(firstSample + index * size + row))),
	);
}

/**
 * Mean loss of a token over `rounds` global batches of the source, or (null) all of its samples, dealt out to lanes in
 * runs. Lanes take equally many microbatches, the last ones empty where samples run out.
 */
function evaluateOn(run: LanguageRun, source: TokenSource, c: TrainingConfiguration, rounds: number | null): number {
	const samples = rounds === null ? source.samples : Math.min(source.samples, rounds * c.evalGlobalBatchSize);
	const size = c.evalMicroBatchSize;
	const perLane = Math.ceil(samples / size / run.lanes);
	const batches = Array.from({ length: perLane }, (_, index) => {
		const first = (run.lane * perLane + index) * size;
		return batchOf(source, first, Math.max(0, Math.min(size, samples - first)), 1)[0]!;
	});
	return evaluate(run.model, batches, { world: run.world }).loss;
}

function requireFinite(model: HybridModel, batch: readonly Microbatch[], iteration: number, result: StepResult): void {
	if (result.updated && Number.isFinite(result.loss)) return;
	const what = Number.isFinite(result.loss) ? "gradient norm" : "loss";
	throw new UserError(`Step ${iteration}: the ${what} is not finite; ${describeNonFinite(model, batch)}.`);
}
