/**
 * Checkpoints of a run: where it starts, when it saves, when it stops early (runtime.md §10, §12.2). The loop calls
 * `afterStep` after every step, on every rank.
 */
import type { Manifest } from "../checkpoint/native/manifest.ts";
import { commonOf, dataObjectName, type TrainingProgress } from "../checkpoint/training/record.ts";
import { CheckpointSaver } from "../checkpoint/training/saver.ts";
import { TrainingTensors } from "../checkpoint/training/tensors.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { LogicalTensor } from "../models/module-parameters.ts";
import { UserError } from "../native/errors.ts";
import { programVersion } from "../native/program-version.ts";
import { learningRateAt, type Schedules, schedulesOf, weightDecayAt } from "../optim/schedules.ts";
import { exchangeTexts } from "../parallel/exchange-texts.ts";
import { ExitSignals } from "../parallel/exit-signals.ts";
import { runAgain } from "../parallel/launcher.ts";
import type { Topology } from "../parallel/topology.ts";
import { parameterGroups } from "./parameter-groups.ts";
import { restoreTraining, type StartingPoint } from "./starting-point.ts";
import type { TrainingState } from "./step.ts";

/** This rank of a run. */
export interface CheckpointedRun {
	// biome-ignore lint/suspicious/noExplicitAny: checkpoints do not look at microbatches.
	readonly state: TrainingState<any>;
	readonly topology: Topology;
	/** This rank's part of every tensor of its modules. */
	logicalTensors(): Iterable<LogicalTensor>;
	/** State of this rank's data for a checkpoint, by lane; null on ranks whose data others keep, or that have none. */
	dataState(): { readonly lane: string; readonly state: string } | null;
}

/** Why and how a run ends before its last step. */
export interface EarlyExit {
	readonly exitCode: number;
	/** A sentence. */
	readonly reason: string;
}

export class RunCheckpoints implements Disposable {
	readonly #tensors: TrainingTensors;
	readonly #saver: CheckpointSaver | null;
	readonly #signals: ExitSignals | null;
	#schedules: Schedules;
	/** Step of the newest checkpoint in `save`, as far as this run knows. */
	#latest: number | null = null;

	/** `say`: hears what the user should know; it is called on every rank. */
	constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: CheckpointedRun,
		private readonly say: (sentence: string) => void,
	) {
		const { state } = run;
		this.#schedules = schedulesOf(c);
		this.#tensors = new TrainingTensors({
			replicas: state.replicas,
			logicalTensors: () => run.logicalTensors(),
			optimizer: state.optimizer,
			// A rank without routers has none of them, whatever its place.
			writesLoose: state.routerGroup.rank === 0,
		});
		this.#saver =
			c.save === null
				? null
				: new CheckpointSaver({
						root: c.save,
						world: state.world,
						tensors: this.#tensors,
						withOptimizer: !c.noSaveOptim,
						retention: { keep: c.keep, retainInterval: c.saveRetainInterval },
						goesOnAfterFailure: c.saveRetry,
						say,
					});
		this.#signals = c.exitSignalHandler ? new ExitSignals() : null;
	}

	/** Restores what the configuration names; null: it names nothing. Every rank calls this together. */
	restore(): StartingPoint | null {
		const { state } = this.run;
		const start = restoreTraining(this.c, this.#tensors, this.#schedules, state.world, this.say);
		if (start === null) return null;
		this.#schedules = start.schedules;
		if (this.c.load === this.c.save) this.#latest = start.progress.iteration;
		state.scalars.setStep(start.progress.optimizerSteps);
		return start;
	}

	/** Saves where it is due, and says whether to stop: the same on every rank, all of which call this together. */
	async afterStep(progress: TrainingProgress): Promise<EarlyExit | null> {
		const { c } = this;
		const { iteration } = progress;
		const asked = await this.#agree();
		if (this.#saver?.busy) this.#saver.poll();
		if (asked.signal) return this.#exit(progress, runAgain, `Stopped by a signal after step ${iteration}`);
		if (c.saveInterval !== null && iteration % c.saveInterval === 0) this.#save(progress);
		if (asked.late)
			return this.#exit(progress, 0, `Stopped after ${c.exitDurationInMins} minutes at step ${iteration}`);
		if (c.exitInterval !== null && iteration % c.exitInterval === 0) {
			return this.#exit(progress, 0, `Stopped at step ${iteration}, a multiple of exit-interval`);
		}
		return null;
	}

	/** After the last step: its checkpoint, complete. */
	finish(progress: TrainingProgress): void {
		if (this.#saver === null) return;
		this.#save(progress);
		this.#saver.finish();
		if (this.#saver.failed) throw new UserError(`The checkpoint of step ${progress.iteration} was not saved.`);
	}

	/** What any rank wants. */
	async #agree(): Promise<{ readonly signal: boolean; readonly late: boolean }> {
		const limit = this.c.exitDurationInMins;
		if (this.#signals === null && limit === null) return { signal: false, late: false };
		const signal = (await this.#signals?.asked()) ?? null;
		const late = limit !== null && process.uptime() / 60 > limit;
		const wishes = this.run.state.world.exchange(Int32Array.of(signal === null ? 0 : 1, late ? 1 : 0));
		return { signal: wishes.some(([one]) => one === 1), late: wishes.some(([, one]) => one === 1) };
	}

	#exit(progress: TrainingProgress, exitCode: number, reason: string): EarlyExit {
		if (this.#saver === null) return { exitCode, reason: `${reason}, without a checkpoint.` };
		this.finish(progress);
		return { exitCode, reason: `${reason}.` };
	}

	/** Begins a save unless this step has one; waits for it unless saves are asynchronous. */
	#save(progress: TrainingProgress): void {
		if (this.#saver === null || this.#latest === progress.iteration) return;
		this.#latest = progress.iteration;
		const { c, run } = this;
		const optimizerSteps = run.state.scalars.step.item();
		this.#saver.start(progress.iteration, {
			generator: `mimo ${programVersion()}`,
			model: { ...c } as unknown as Manifest["model"],
			common: commonOf(this.#record({ ...progress, optimizerSteps }), this.#groups(progress, optimizerSteps)),
			objects: this.#dataObjects(),
		});
		if (!c.asyncSave) this.#saver.finish();
	}

	#record(training: TrainingProgress) {
		const { c, run } = this;
		const { learningRate, weightDecay } = this.#schedules;
		const { encoder, language, colocated } = run.topology;
		return {
			training,
			schedules: c.noSaveOptim ? null : { learningRate: { ...learningRate }, weightDecay: { ...weightDecay } },
			rng: c.noSaveRng ? null : { seed: c.seed },
			participation: c.encoderGradParticipation,
			topology: {
				encoder: encoder?.shape ?? null,
				language: language.shape,
				colocated,
				distributedOptimizer: c.useDistributedOptimizer,
			},
		};
	}

	#groups({ scheduledSamples }: TrainingProgress, step: number): Manifest["common"][string] {
		if (this.c.noSaveOptim) return {};
		const { learningRate, weightDecay } = this.#schedules;
		return parameterGroups(this.c, {
			step,
			learningRate: learningRateAt(learningRate, scheduledSamples),
			weightDecay: weightDecayAt(weightDecay, scheduledSamples),
		});
	}

	/** States of the data of all lanes, on every rank. */
	#dataObjects() {
		const own = this.run.dataState();
		const states = exchangeTexts(this.run.state.world, own === null ? "" : JSON.stringify(own))
			.filter((text) => text !== "")
			.map((text) => JSON.parse(text) as { lane: string; state: string });
		const encode = (state: string) => ({ encoding: "json" as const, bytes: new TextEncoder().encode(state) });
		return Object.fromEntries(states.map(({ lane, state }) => [dataObjectName(lane), encode(state)]));
	}

	[Symbol.dispose](): void {
		this.#saver?.[Symbol.dispose]();
		this.#signals?.[Symbol.dispose]();
		this.#tensors[Symbol.dispose]();
	}
}
