/** The training loop: schedules → data → step → log, with listeners and evaluations between steps. */
import { plannedIterations } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { GuestReport } from "../guests/guest.ts";
import { Interrupts } from "../native/interrupts.ts";
import type { RunRecords } from "../observe/run-records.ts";
import type { Observer, StepSeconds } from "../observe/step-report.ts";
import type { StepPart, StepTimers } from "../observe/timers.ts";
import { learningRateAt, type Schedules, weightDecayAt } from "../optim/schedules.ts";
import type { World } from "../parallel/index.ts";
import { debug } from "../system/debug.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { TokenSlice } from "../tensor/index.ts";
import { isReportingRank, type Run } from "./assemble.ts";
import { evaluateAll } from "./evaluate.ts";
import { dataPlaceOf, type EvaluationSource, type RunData } from "./feed/batch-source.ts";
import { BatchQueue, type StepBatch } from "./feed/shared-batches.ts";
import type { Listener, Progress, Stop } from "./listeners.ts";
import { languageModelLoss } from "./losses.ts";
import { describeNonFinite } from "./report/non-finite.ts";
import { openProfile } from "./report/profile.ts";
import type { SkippedReport } from "./report/skipped-samples.ts";
import { openTiming, StepMetrics } from "./report/step-metrics.ts";
import { takeGradients, update } from "./step.ts";
import type { StepGradients, StepInput, StepResult } from "./step-state.ts";
import { LargeValues } from "./wrong-results.ts";

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
	/** Guests' sentences about the final evaluation. */
	readonly heldOutSentences: readonly string[];
	/** Why the training ended before its last step; null: it reached the last step. */
	readonly stop: Stop | null;
}

/** Inputs of the loop beside the configuration and the run. */
export interface LoopParts {
	readonly world: World;
	readonly data: RunData;
	readonly skippedReport: SkippedReport;
	readonly observer: Observer;
	readonly records: RunRecords;
	readonly listeners: readonly Listener[];
	/** Progress to start from. */
	readonly start: Progress;
	readonly schedules: Schedules;
}

/** Runs the training from `start`. Collective over the world. */
export async function trainingLoop(
	c: TrainingConfiguration,
	run: Run,
	{ world, data, skippedReport, observer, records, listeners, start, schedules }: LoopParts,
): Promise<TrainingSummary> {
	const iterations = plannedIterations(c);
	if (start.iteration > 0) world.progress(start.iteration);
	const metrics = new StepMetrics(c, run, world);
	const profile = openProfile(c, run, { world, clock: metrics.clock, records, say: (text) => observer.note(text) });
	const timing = openTiming(c, run, world, observer);
	const own = [profile, timing?.listener ?? null].filter((one) => one !== null);
	using interrupts = new Interrupts(world.device.library, isReportingRank(run) ? announcement(c) : "");
	const state: LoopState = {
		c,
		run,
		world,
		data,
		skippedReport,
		observer,
		listeners: [...listeners, ...own],
		schedules,
		metrics,
		timers: timing?.timers,
		batches: new BatchQueue(data.training, iterations, run.readsAhead ? 1 : 0),
		interrupts,
		firstToken: firstTokenOf(c, run),
	};
	return await new TrainingLoop(state, start).train(iterations);
}

interface LoopState extends Omit<LoopParts, "start" | "records"> {
	readonly c: TrainingConfiguration;
	readonly run: Run;
	readonly metrics: StepMetrics;
	readonly timers: StepTimers | undefined;
	readonly batches: BatchQueue;
	readonly interrupts: Interrupts;
	/** Index of this lane's first token in a step's global batch. */
	readonly firstToken: number;
}

/** A step that has been done, as the log and the listeners see it. */
interface DoneStep {
	readonly input: StepInput;
	readonly result: StepResult;
	readonly partSeconds: StepSeconds;
	readonly seconds: number;
	/** Whether any rank was interrupted (SIGINT) during the step. */
	readonly interrupted: boolean;
	/** Whether any rank has new skipped samples to report. */
	readonly skippedSamples: boolean;
}

class TrainingLoop {
	#progress: Progress;
	#stop: Stop | null = null;
	#steps = 0;
	#tokens = 0;
	#seconds = 0;
	#firstLoss = Number.NaN;
	#lastLoss = Number.NaN;
	readonly #losses = new LargeValues("loss");
	readonly #norms = new LargeValues("gradient norm");

	constructor(
		private readonly state: LoopState,
		start: Progress,
	) {
		this.#progress = start;
	}

	async train(iterations: number): Promise<TrainingSummary> {
		const { listeners, world, interrupts } = this.state;
		while (this.#progress.iteration < iterations && this.#stop === null) {
			const iteration = this.#progress.iteration + 1;
			for (const listener of listeners) await listener.beforeStep?.(iteration);
			const done = await this.#step(iteration);
			world.progress(iteration);
			this.#advance(iteration, done);
			await this.#report(iteration, done);
			await this.#evaluateIfDue(iteration);
			for (const listener of listeners) this.#stop = (await listener.betweenSteps?.(this.#progress)) ?? this.#stop;
		}
		for (const listener of listeners) await listener.afterTraining?.(this.#progress);
		if (this.#stop === null && (await agree(this.state.run, interrupts, false)).interrupted) this.#interrupt();
		// Nothing is lost any more by an end at once.
		interrupts[Symbol.dispose]();
		return { ...(await this.#finalEvaluation()), ...this.#summary() };
	}

	/** Data → gradients → update → the next step's data. */
	async #step(iteration: number): Promise<DoneStep> {
		const { c, run, metrics, timers, batches, interrupts, skippedReport, listeners } = this.state;
		const started = performance.now();
		metrics.clock.start("data");
		const batch = await this.#readData(() => batches.step(iteration));
		metrics.clock.enter("other");
		const input = this.#stepInput(iteration, batch);
		const watch = { part: (part: StepPart) => metrics.clock.enter(part), timers };
		if (this.#steps === 0) debug(1, "the first batch is here");
		const gradients = takeGradients(run.state, input, watch);
		if (this.#steps === 0) debug(1, "the first gradients are taken");
		for (const listener of listeners) await listener.beforeUpdate?.();
		const { interrupted, skippedSamples } = await agree(run, interrupts, skippedReport.hasNews);
		// After what finds the rank to blame: here all say the same.
		if (c.checkForNanInLossAndGrad) requireFinite(run, input.microbatches, iteration, gradients);
		if (c.checkForSpikyLoss) this.#losses.require(iteration, gradients.loss);
		if (c.checkForLargeGrads) this.#norms.require(iteration, gradients.gradientNorm);
		const result = update(run.state, input, gradients, watch);
		// Read while the GPU still works on the optimizer step.
		metrics.clock.enter("data");
		if (!interrupted) await this.#readData(() => batches.readAhead(iteration));
		const partSeconds = metrics.clock.stop();
		const seconds = (performance.now() - started) / 1000;
		debug(2, `step ${iteration}: loss ${result.loss}, ${seconds.toFixed(3)} s`);
		return { input, result, partSeconds, seconds, interrupted, skippedSamples };
	}

	async #readData<Result>(read: () => Promise<Result>): Promise<Result> {
		const { timers } = this.state;
		timers?.start("batch-generator");
		const result = await read();
		timers?.stop("batch-generator");
		return result;
	}

	/** The step's microbatches, with the learning rate and weight decay of its place in the schedules. */
	#stepInput(iteration: number, { microbatches, upcoming }: StepBatch): StepInput {
		const { schedules, firstToken } = this.state;
		const { scheduledSamples } = this.#progress;
		return {
			microbatches,
			upcoming,
			tokens: TokenSlice.of(firstToken, tokensIn(microbatches)),
			iteration: iteration - 1,
			learningRate: learningRateAt(schedules.learningRate, scheduledSamples),
			weightDecay: weightDecayAt(schedules.weightDecay, scheduledSamples),
		};
	}

	#advance(iteration: number, { result, seconds }: DoneStep): void {
		const { globalBatchSize } = this.state.c;
		const { consumedSamples, scheduledSamples } = this.#progress;
		this.#progress = {
			...this.#progress,
			iteration,
			consumedSamples: consumedSamples + globalBatchSize,
			scheduledSamples: scheduledSamples + (result.updated ? globalBatchSize : 0),
			kept: Object.assign({}, ...this.state.run.guests.map((guest) => guest.keep?.() ?? {})),
		};
		this.#seconds += seconds;
		this.#tokens += result.tokens;
		if (this.#steps++ === 0) this.#firstLoss = result.loss;
		this.#lastLoss = result.loss;
	}

	async #report(iteration: number, done: DoneStep): Promise<void> {
		const { c, metrics, skippedReport, observer, listeners, schedules } = this.state;
		const { input, result, seconds } = done;
		const { learningRate, weightDecay } = input;
		const nextLearningRate = learningRateAt(schedules.learningRate, this.#progress.scheduledSamples);
		const measured = metrics.collect(iteration, input.microbatches, result, done.partSeconds);
		for (const sentence of metrics.slowRanks) {
			observer.note(sentence);
			observer.event?.({ kind: "slow", step: iteration, sentence });
		}
		if (done.skippedSamples) skippedReport.tell(observer, iteration);
		observer.step({
			...measured,
			iteration,
			consumedSamples: this.#progress.consumedSamples,
			skippedSamples: 0,
			globalBatchSize: c.globalBatchSize,
			tokens: result.tokens,
			seconds,
			learningRate,
			nextLearningRate,
			losses: { ...result.losses, ...result.balancing },
			lossScale: 1,
			gradNorm: result.updated ? result.gradientNorm : null,
			numZeros: result.zeroGradients,
			paramsNorm: result.parametersNorm,
			skipped: !result.updated,
			participation: result.participation,
		});
		if (done.interrupted) this.#interrupt();
		const event = { progress: this.#progress, result, learningRate, nextLearningRate, weightDecay, seconds };
		for (const listener of listeners) await listener.afterStep?.(event);
	}

	/** Ends the training at the user's request. The last step is saved as that of any training is. */
	#interrupt(): void {
		const saved = this.state.c.save === null ? ", without a checkpoint" : "";
		const reason = `Interrupted: stopped after step ${this.#progress.iteration}${saved}.`;
		this.#stop = { exitCode: exitCodes.interrupted, reason };
	}

	async #evaluateIfDue(iteration: number): Promise<void> {
		const { c, run, data, observer, listeners } = this.state;
		const due = c.evalIters > 0 && iteration % c.evalInterval === 0;
		if (this.#stop !== null || !due || data.validation === null) return;
		const losses = await evaluateOn(run, data.validation, c.evalIters);
		const { consumedSamples, consumedValidSamples } = this.#progress;
		this.#progress = {
			...this.#progress,
			consumedValidSamples: consumedValidSamples + c.evalIters * c.evalGlobalBatchSize,
		};
		const label = `iteration ${iteration}`;
		observer.evaluation({ iteration, consumedSamples, split: "validation", label, losses });
		for (const { event } of reportsOf(run, losses)) observer.event?.(event(iteration));
		for (const listener of listeners) await listener.afterEvaluation?.(losses[languageModelLoss]!, iteration);
	}

	/** The evaluation after the training, over all held-out data; none after a stop. */
	async #finalEvaluation(): Promise<Pick<TrainingSummary, "heldOutLoss" | "heldOutSentences">> {
		const { c, run, data, observer, listeners } = this.state;
		if (this.#stop === null && data.test) {
			const { iteration, consumedSamples } = this.#progress;
			const losses = await evaluateOn(run, data.test, c.evalIters);
			const label = `iteration ${iteration} on test set`;
			observer.evaluation({ iteration, consumedSamples, split: "test", label, losses });
		}
		if (this.#stop !== null || data.validation === null) return { heldOutLoss: null, heldOutSentences: [] };
		const losses = await evaluateOn(run, data.validation, null);
		const heldOutLoss = losses[languageModelLoss] ?? null;
		const reports = reportsOf(run, losses);
		for (const { event } of reports) observer.event?.(event(this.#progress.iteration));
		if (heldOutLoss !== null) for (const listener of listeners) await listener.afterEvaluation?.(heldOutLoss, null);
		return { heldOutLoss, heldOutSentences: reports.flatMap(({ sentences }) => sentences) };
	}

	#summary(): Omit<TrainingSummary, "heldOutLoss" | "heldOutSentences"> {
		return {
			progress: this.#progress,
			steps: this.#steps,
			firstLoss: this.#firstLoss,
			lastLoss: this.#lastLoss,
			tokens: this.#tokens,
			seconds: this.#seconds,
			stop: this.#stop,
		};
	}
}

/** Sentences of this rank's guests about an evaluation. */
function reportsOf({ guests }: Run, losses: Readonly<Record<string, number>>): GuestReport[] {
	return guests.flatMap((guest) => guest.report?.(losses) ?? []);
}

/** The message of the first Ctrl-C. */
function announcement({ save }: TrainingConfiguration): string {
	const then = save === null ? ", without a checkpoint" : " and saves a checkpoint";
	return `mimo: Interrupted: the run stops after this step${then}; Ctrl-C again ends it at once.`;
}

/** Agrees over all ranks on whether any was interrupted (SIGINT), and whether any has new skipped samples to report. */
async function agree(
	{ state: { world } }: Run,
	interrupts: Interrupts,
	ownSkipped: boolean,
): Promise<Pick<DoneStep, "interrupted" | "skippedSamples">> {
	// Turns the event loop once: a closed output is reported there.
	await new Promise<void>((resolve) => setImmediate(resolve));
	const everyone = world.exchange(Int32Array.of(interrupts.asked ? 1 : 0, ownSkipped ? 1 : 0));
	return {
		interrupted: everyone.some(([asked]) => asked === 1),
		skippedSamples: everyone.some(([, skipped]) => skipped === 1),
	};
}

/** Index of this lane's first token in a step's global batch, by which dropout masks are drawn. */
function firstTokenOf(c: TrainingConfiguration, { topology, rank }: Run): number {
	const { textLane, laneCount } = dataPlaceOf(topology, rank);
	return (((textLane ?? 0) * c.globalBatchSize) / laneCount) * c.seqLength;
}

function tokensIn(microbatches: readonly ImageTextMicrobatch[]): number {
	return microbatches.reduce((sum, { text }) => sum + text.ids.length, 0);
}

/** Mean of every loss, of the model and of the parts of it that evaluations run. */
async function evaluateOn(
	run: Run,
	source: EvaluationSource,
	rounds: number | null,
): Promise<Readonly<Record<string, number>>> {
	return evaluateAll(run.state, await source.microbatches(rounds), run.evaluations);
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
