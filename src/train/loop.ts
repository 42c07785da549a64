/** The training loop: schedules → data → step → log, with listeners and evaluations between steps. */
import { plannedIterations } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { ElasticRouter } from "../elastic/router/router.ts";
import { budgetRecords } from "../elastic/submodel/family-records.ts";
import { ExitSignals } from "../launch/exit-signals.ts";
import { debug } from "../native/debug.ts";
import { UserError } from "../native/errors.ts";
import { exitCodes } from "../native/exit-codes.ts";
import { type BudgetRecord, familyEvent } from "../observe/run-log/family.ts";
import type { RunRecords } from "../observe/run-records.ts";
import type { StepPart } from "../observe/step-clock.ts";
import type { Observer } from "../observe/step-report.ts";
import { learningRateAt, type Schedules, weightDecayAt } from "../optim/schedules.ts";
import type { World } from "../parallel/world.ts";
import { TokenSlice } from "../tensor/token-slice.ts";
import type { Run } from "./assemble.ts";
import { evaluateBudgets } from "./evaluate.ts";
import { BatchQueue } from "./feed/batch-queue.ts";
import { dataPlaceOf, type EvaluationSource, type RunData } from "./feed/batch-source.ts";
import { evaluatedBudgets } from "./from-configuration.ts";
import type { Listener, Progress, Stop } from "./listeners.ts";
import { languageModelLoss } from "./losses.ts";
import { describeNonFinite } from "./report/non-finite.ts";
import { openProfile } from "./report/profile.ts";
import type { SkippedReport } from "./report/skipped-samples.ts";
import { StepMetrics } from "./report/step-metrics.ts";
import { openTiming } from "./report/timing.ts";
import { type StepGradients, takeGradients, update } from "./step.ts";

export interface TrainingSummary {
	readonly progress: Progress;
	/** Steps that this process has run. */
	readonly steps: number;
	readonly firstLoss: number;
	readonly lastLoss: number;
	readonly tokens: number;
	/** Seconds spent in steps, without evaluations and saves. */
	readonly seconds: number;
	/** Mean loss of a held-out token after the training; null without validation data, or if the training was stopped. */
	readonly heldOutLoss: number | null;
	/** Final evaluation of an elastic model's submodel at each budget; empty on ranks without the model. */
	readonly heldOutBudgets: readonly BudgetRecord[];
	/** Why the training ended before its last step; null: it reached the last step. */
	readonly stop: Stop | null;
}

/** What the loop needs beside the configuration and the run. */
export interface LoopParts {
	readonly world: World;
	readonly data: RunData;
	readonly leftOut: SkippedReport;
	readonly observer: Observer;
	readonly records: RunRecords;
	readonly listeners: readonly Listener[];
	/** Progress to start from. */
	readonly start: Progress;
	readonly schedules: Schedules;
}

export async function trainingLoop(
	c: TrainingConfiguration,
	run: Run,
	{ world, data, leftOut, observer, records, listeners: given, start, schedules }: LoopParts,
): Promise<TrainingSummary> {
	const { learningRate, weightDecay } = schedules;
	const iterations = plannedIterations(c);
	const firstToken = firstTokenOf(c, run);
	let progress = start;
	let [steps, allTokens, seconds] = [0, 0, 0];
	let [firstLoss, lastLoss] = [Number.NaN, Number.NaN];
	let stop: Stop | null = null;
	const metrics = new StepMetrics(c, run, world);
	const profile = openProfile(c, run, { world, clock: metrics.clock, records, say: (text) => observer.note(text) });
	const timing = openTiming(c, run, world, observer);
	const own = [profile, timing?.listener ?? null].filter((one) => one !== null);
	const listeners = [...given, ...own];
	using interrupts = new ExitSignals(["SIGINT"]);
	const batches = new BatchQueue(data.training, iterations, c.mimoEncoderPrefetch ? 1 : 0);
	while (progress.iteration < iterations && stop === null) {
		const iteration = progress.iteration + 1;
		for (const listener of listeners) await listener.beforeStep?.(iteration);
		const started = performance.now();
		metrics.clock.start("data");
		timing?.timers.start("batch-generator");
		const { microbatches, upcoming } = await batches.step(iteration);
		timing?.timers.stop("batch-generator");
		metrics.clock.enter("other");
		const rate = learningRateAt(learningRate, progress.scheduledSamples);
		const decay = weightDecayAt(weightDecay, progress.scheduledSamples);
		const tokens = TokenSlice.of(firstToken, tokensIn(microbatches));
		const about = { iteration: iteration - 1, learningRate: rate, weightDecay: decay };
		const input = { microbatches, upcoming, tokens, ...about };
		const watch = { part: (part: StepPart) => metrics.clock.enter(part), timers: timing?.timers };
		if (steps === 0) debug(1, "the first batch is here");
		const gradients = takeGradients(run.state, input, watch);
		if (steps === 0) debug(1, "the first gradients are taken");
		if (c.checkForNanInLossAndGrad) requireFinite(run, microbatches, iteration, gradients);
		const { interrupted, news } = await agree(run, interrupts, leftOut.hasNews);
		for (const listener of listeners) await listener.beforeUpdate?.();
		const result = update(run.state, input, gradients, watch);
		// Read while the GPU still works on the optimizer step.
		metrics.clock.enter("data");
		timing?.timers.start("batch-generator");
		if (!interrupted) await batches.readAhead(iteration);
		timing?.timers.stop("batch-generator");
		const partSeconds = metrics.clock.stop();
		world.progress(iteration);
		progress = {
			...progress,
			iteration,
			consumedSamples: progress.consumedSamples + c.globalBatchSize,
			scheduledSamples: progress.scheduledSamples + (result.updated ? c.globalBatchSize : 0),
		};
		const stepSeconds = (performance.now() - started) / 1000;
		debug(2, `step ${iteration}: loss ${result.loss}, ${stepSeconds.toFixed(3)} s`);
		seconds += stepSeconds;
		allTokens += result.tokens;
		if (steps++ === 0) firstLoss = result.loss;
		lastLoss = result.loss;
		const nextLearningRate = learningRateAt(learningRate, progress.scheduledSamples);
		const measured = metrics.collect(microbatches, result, partSeconds);
		if (news) leftOut.tell(observer, iteration);
		observer.step({
			...measured,
			iteration,
			consumedSamples: progress.consumedSamples,
			skippedSamples: 0,
			globalBatchSize: c.globalBatchSize,
			tokens: result.tokens,
			seconds: stepSeconds,
			learningRate: rate,
			nextLearningRate,
			losses: { ...result.losses, ...result.balancing },
			lossScale: 1,
			gradNorm: result.updated ? result.gradientNorm : null,
			numZeros: result.zeroGradients,
			paramsNorm: result.parametersNorm,
			skipped: !result.updated,
			participation: result.participation,
		});
		const event = {
			progress,
			result,
			learningRate: rate,
			nextLearningRate,
			weightDecay: decay,
			seconds: stepSeconds,
		};
		if (interrupted)
			stop = { exitCode: exitCodes.interrupted, reason: `Interrupted: stopped after step ${iteration}.` };
		for (const listener of listeners) await listener.afterStep?.(event);
		if (stop === null && c.evalIters > 0 && iteration % c.evalInterval === 0 && data.validation) {
			const losses = await evaluateOn(c, run, data.validation, c.evalIters);
			progress = {
				...progress,
				consumedValidSamples: progress.consumedValidSamples + c.evalIters * c.evalGlobalBatchSize,
			};
			observer.evaluation({
				iteration,
				consumedSamples: progress.consumedSamples,
				split: "validation",
				label: `iteration ${iteration}`,
				losses,
			});
			if (run.elastic) observer.event?.(familyEvent(iteration, familyOf(run.elastic, losses)));
			const loss = losses[languageModelLoss]!;
			for (const listener of listeners) await listener.afterEvaluation?.(loss, iteration);
		}
		for (const listener of listeners) stop = (await listener.betweenSteps?.(progress)) ?? stop;
	}
	for (const listener of listeners) await listener.afterTraining?.(progress);
	const heldOut = stop === null && data.validation ? await evaluateOn(c, run, data.validation, null) : null;
	const heldOutLoss = heldOut?.[languageModelLoss] ?? null;
	const heldOutBudgets = run.elastic && heldOut ? familyOf(run.elastic, heldOut) : [];
	if (heldOutBudgets.length > 0) observer.event?.(familyEvent(progress.iteration, heldOutBudgets));
	if (heldOutLoss !== null) for (const listener of listeners) await listener.afterEvaluation?.(heldOutLoss, null);
	return { progress, steps, firstLoss, lastLoss, tokens: allTokens, seconds, heldOutLoss, heldOutBudgets, stop };
}

/** The submodels that the router now chooses for each budget, with their losses in an evaluation. */
function familyOf(router: ElasticRouter, losses: Readonly<Record<string, number>>) {
	return budgetRecords({ config: router.config, weights: router.weights() }, router.model.config, losses);
}

/** Agrees over all ranks on whether any was interrupted (SIGINT), and whether any has new skipped samples to report. */
async function agree(
	{ state: { world } }: Run,
	interrupts: ExitSignals,
	ownNews: boolean,
): Promise<{ readonly interrupted: boolean; readonly news: boolean }> {
	const own = (await interrupts.asked()) !== null;
	const everyone = world.exchange(Int32Array.of(own ? 1 : 0, ownNews ? 1 : 0));
	return { interrupted: everyone.some(([asked]) => asked === 1), news: everyone.some(([, news]) => news === 1) };
}

/** Index of this lane's first token in a step's global batch, by which dropout masks are drawn. */
function firstTokenOf(c: TrainingConfiguration, { topology, rank }: Run): number {
	const { textLane, laneCount } = dataPlaceOf(topology, rank);
	return (((textLane ?? 0) * c.globalBatchSize) / laneCount) * c.seqLength;
}

function tokensIn(microbatches: readonly ImageTextMicrobatch[]): number {
	return microbatches.reduce((sum, { text }) => sum + text.ids.length, 0);
}

/** Mean of every loss, of the model and of an elastic model's submodels. */
async function evaluateOn(
	c: TrainingConfiguration,
	run: Run,
	source: EvaluationSource,
	rounds: number | null,
): Promise<Readonly<Record<string, number>>> {
	return evaluateBudgets(run.state, await source.microbatches(rounds), evaluatedBudgets(c));
}

function requireFinite(
	run: Run,
	microbatches: readonly ImageTextMicrobatch[],
	iteration: number,
	result: StepGradients,
): void {
	if (result.updated && Number.isFinite(result.loss)) return;
	const what = Number.isFinite(result.loss) ? "gradient norm" : "loss";
	const inspected = {
		...run.state,
		parameters: run.state.replicas.map(({ parameters }) => parameters),
		pattern: run.language?.config.pattern ?? [],
	};
	throw new UserError(`Step ${iteration}: the ${what} is not finite; ${describeNonFinite(inspected, microbatches)}.`);
}
