/** The checkpointing of a run: restoring at the start, saving, and stopping early (docs/spec/runtime.md §10, §12.2). */
import {
	CheckpointSaver,
	commonOf,
	dataObject,
	type Json,
	type Manifest,
	openStore,
	TrainingTensors,
} from "../../checkpoint/index.ts";
import { hasEncoder } from "../../config/derive.ts";
import { shownConfiguration } from "../../config/print.ts";
import type { TrainingConfiguration } from "../../config/schema.ts";
import { launcherEnded, outlivesLauncher, placeFromEnvironment } from "../../launch/place.ts";
import { languageLora, visionLora } from "../../models/lora.ts";
import { learningRateAt, type Schedules, schedulesOf, weightDecayAt } from "../../optim/schedules.ts";
import { exchangeTexts } from "../../parallel/index.ts";
import { counted } from "../../system/counted.ts";
import { UserError } from "../../system/errors.ts";
import { exitCodes } from "../../system/exit-codes.ts";
import { programVersion } from "../../system/program-version.ts";
import type { Run } from "../assemble.ts";
import type { Listener, Progress, Stop } from "../listeners.ts";
import type { SaveClaim } from "./save-claim.ts";
import {
	type Provenance,
	precisionOf,
	provenanceOfFolders,
	restoreTraining,
	type StartingPoint,
} from "./starting-point.ts";

/** Signals in ascending priority, if ranks received different ones; null: no signal. */
const agreed: readonly (NodeJS.Signals | null)[] = [null, launcherEnded, "SIGUSR1", "SIGTERM"];

/** Requests to stop, over all ranks. */
interface Wish {
	readonly signal: NodeJS.Signals | null;
	/** --exit-duration-in-mins is over. */
	readonly late: boolean;
}

const nothingAsked: Wish = { signal: null, late: false };

export interface CheckpointOptions {
	/** Called on every rank with messages and warnings for the user. */
	readonly say: (sentence: string) => void;
	readonly warn: (sentence: string) => void;
	/** State of this rank's data, as JSON; undefined: the step's number suffices to resume. */
	readonly dataState: () => Promise<unknown>;
	/** Called before the first save of this run begins. */
	readonly saves: () => void;
	/** The run's claim to its --save folder. */
	readonly claim: SaveClaim;
}

export class Checkpoints implements Listener {
	readonly #tensors: TrainingTensors;
	readonly #saver: CheckpointSaver | null;
	readonly #signals: ExitSignals | null;
	#schedules: Schedules;
	#provenance: Provenance;
	/** Step of the newest checkpoint in --save, if known. */
	#latest: number | null = null;
	/** Lineage: the name of the run that started this training. */
	#lineage: string;
	/** Requests received during the current step. */
	#asked = nothingAsked;

	constructor(
		private readonly c: TrainingConfiguration,
		private readonly run: Run,
		private readonly options: CheckpointOptions,
	) {
		const { state } = run;
		this.#lineage = options.claim.run;
		this.#schedules = schedulesOf(c);
		this.#provenance = provenanceOfFolders(c);
		this.#tensors = new TrainingTensors({
			replicas: state.replicas,
			logicalTensors: () => run.logicalTensors(),
			optimizer: state.optimizer,
			// Only ranks with routers have tensors outside the buffers.
			writesLoose: state.language?.routers.rank === 0,
		});
		this.#saver =
			c.save === null
				? null
				: new CheckpointSaver({
						store: openStore(c.save, c.stagingDir),
						world: state.world,
						tensors: this.#tensors,
						withOptimizer: !c.noSaveOptim,
						retention: { keep: c.keep, retainInterval: c.saveRetainInterval },
						...options.claim,
						goesOnAfterFailure: c.saveRetry,
						note: options.say,
						warn: options.warn,
					});
		const signals = signalsOf(c);
		this.#signals = signals.length === 0 ? null : new ExitSignals(signals);
	}

	/** The schedules of the training: the configuration's, or the checkpoint's if flags ask for them. */
	get schedules(): Schedules {
		return this.#schedules;
	}

	/** This rank's tensors. */
	get tensors(): TrainingTensors {
		return this.#tensors;
	}

	/** Throws a UserError if the first checkpoint would not fit on the disk. Collective over the world. */
	requireRoom(): void {
		this.#saver?.requireRoom();
	}

	/** Lineage: the name of the run that started this training, kept over resumes. */
	get lineage(): string {
		return this.#lineage;
	}

	/** The kept parts of the Hugging Face folders that the training started from. */
	get provenance(): Provenance {
		return this.#provenance;
	}

	/**
	 * Restores the checkpoint that the configuration names; null if it names none. `again`: as a part of a restart, which says
	 * nothing of it. Collective over the world.
	 */
	async restore(again: boolean): Promise<StartingPoint | null> {
		const { world } = this.run.state;
		const printers = again ? { say: () => {}, warn: () => {} } : this.options;
		const start = await restoreTraining(this.c, this.#tensors, this.#schedules, world, printers);
		if (start !== null && this.c.load === this.c.save) this.#latest = start.progress.iteration;
		if (start !== null) this.goOnFrom(start);
		return start;
	}

	/** Takes over what a starting point says beside its tensors. */
	goOnFrom(start: StartingPoint): void {
		this.#schedules = start.schedules;
		this.#provenance = start.provenance;
		this.#lineage = start.lineage ?? this.#lineage;
		this.run.state.scalars.setStep(start.optimizerSteps);
	}

	async beforeUpdate(): Promise<void> {
		this.#asked = await this.#agree();
	}

	async betweenSteps(progress: Progress): Promise<Stop | undefined> {
		const { c } = this;
		const { iteration } = progress;
		const asked = this.#asked;
		if (this.#saver?.busy) this.#saver.poll();
		const saved = c.save === null ? ", without a checkpoint" : "";
		if (asked.signal !== null) {
			const cause = asked.signal === launcherEnded ? "with its launcher" : `by ${asked.signal}`;
			const reason = `Stopped ${cause} after step ${iteration}${saved}.`;
			// Batch systems send SIGUSR1 ahead of the time limit; SIGTERM ends a job for good.
			return { exitCode: exitCodes.runAgain, reason, requeue: asked.signal === "SIGUSR1" && c.save !== null };
		}
		if (c.saveInterval !== null && iteration % c.saveInterval === 0) await this.#save(progress);
		if (asked.late) {
			return {
				exitCode: 0,
				reason: `Stopped after step ${iteration}: the time of ${counted(c.exitDurationInMins!, "minute")} is over${saved}.`,
			};
		}
		if (c.exitInterval !== null && iteration % c.exitInterval === 0) {
			return { exitCode: 0, reason: `Stopped after step ${iteration}, a multiple of exit-interval${saved}.` };
		}
		return undefined;
	}

	/** Saves the last step and waits until the checkpoint is complete. */
	async afterTraining(progress: Progress): Promise<void> {
		if (this.#saver === null) return;
		await this.#save(progress);
		this.#saver.finish();
		if (this.#saver.failed) throw new UserError(`The checkpoint of step ${progress.iteration} was not saved.`);
	}

	/** The highest-priority request over all ranks. */
	async #agree(): Promise<Wish> {
		const limit = this.c.exitDurationInMins;
		if (this.#signals === null && limit === null) return nothingAsked;
		const signal = (await this.#signals?.asked()) ?? null;
		const late = limit !== null && process.uptime() / 60 > limit;
		const wishes = this.run.state.world.exchange(Int32Array.of(agreed.indexOf(signal), late ? 1 : 0));
		const strongest = Math.max(...wishes.map(([one]) => one!));
		return { signal: agreed[strongest] ?? null, late: wishes.some(([, one]) => one === 1) };
	}

	/** Starts a save unless this step has one; waits for it unless saves are asynchronous. */
	async #save(progress: Progress): Promise<void> {
		if (this.#saver === null || this.#latest === progress.iteration) return;
		this.options.saves();
		this.#latest = progress.iteration;
		const { c, run } = this;
		const optimizerSteps = run.state.scalars.step.item();
		const data = await this.#dataStates();
		this.#saver.start(progress.iteration, {
			generator: `mimo ${programVersion()}`,
			model: { ...shownConfiguration(c) } as unknown as Manifest["model"],
			common: commonOf(this.#record(progress, optimizerSteps), this.#groups(progress, optimizerSteps)),
			source: this.#provenance.source,
			objects: {
				...this.#provenance.objects,
				[dataObject]: { encoding: "json", bytes: new TextEncoder().encode(data) },
			},
		});
		if (!c.asyncSave) this.#saver.finish();
	}

	#record(progress: Progress, optimizerSteps: number) {
		const { c, run } = this;
		const { learningRate, weightDecay } = this.#schedules;
		const { encoders, language, colocated } = run.topology;
		return {
			training: { ...progress, optimizerSteps, globalBatchSize: c.globalBatchSize },
			schedules: c.noSaveOptim ? null : { learningRate: { ...learningRate }, weightDecay: { ...weightDecay } },
			rng: c.noSaveRng ? null : { seed: c.seed },
			participation: c.encoderGradParticipation,
			precision: precisionOf(c),
			updates: c.optimizer,
			lineage: this.#lineage,
			topology: {
				encoder: encoders[0]?.shape ?? null,
				language: language.shape,
				colocated,
				distributedOptimizer: c.useDistributedOptimizer,
			},
		};
	}

	#groups({ scheduledSamples }: Progress, step: number): Manifest["common"][string] {
		if (this.c.noSaveOptim) return {};
		const { learningRate, weightDecay } = this.#schedules;
		return parameterGroups(this.c, {
			step,
			learningRate: learningRateAt(learningRate, scheduledSamples),
			weightDecay: weightDecayAt(weightDecay, scheduledSamples),
		});
	}

	/** JSON list of the ranks' data states, null for a rank without one. */
	async #dataStates(): Promise<string> {
		const own = JSON.stringify((await this.options.dataState()) ?? null);
		return `[${exchangeTexts(this.run.state.world, own).join(",")}]`;
	}

	close(): void {
		this.#saver?.[Symbol.dispose]();
		this.#signals?.[Symbol.dispose]();
		this.#tensors[Symbol.dispose]();
	}
}

// The optimizer's groups as Megatron describes them in a checkpoint (docs/spec/checkpoint.md §3.6): for each module its
// dense parameters, with and without weight decay, then its experts'.

/** `step`: optimizer steps taken; the values are those of the last one. */
function parameterGroups(
	c: TrainingConfiguration,
	now: { readonly step: number; readonly learningRate: number; readonly weightDecay: number },
): Json {
	const group = (expert: boolean, decays: boolean): Json => ({
		is_expert_parallel: expert,
		default_config: true,
		wd_mult: decays ? 1 : 0,
		lr_mult: 1,
		is_decoupled_lr: false,
		max_lr: c.lr,
		min_lr: c.minLr,
		lr: now.learningRate,
		bias_correction: true,
		betas: [c.adamBeta1, c.adamBeta2],
		eps: c.adamEps,
		weight_decay: decays ? now.weightDecay : 0,
		step: now.step,
	});
	const dense = [group(false, true), group(false, false)];
	const encoder = hasEncoder(c) && !(c.freezeVit && c.freezeProjection);
	const trainsExperts = c.loraRank === null || c.loraTargetModules.some((module) => module.startsWith("experts."));
	const experts = c.numExperts > 0 && trainsExperts ? [[group(true, true)]] : [];
	// Adapters are matrices.
	const language = c.loraRank === null ? dense : dense.slice(0, 1);
	return {
		...(encoder
			? { radio_encoder: [c.freezeVit || visionLora(c, "vision_model") !== null ? dense.slice(0, 1) : dense] }
			: {}),
		...(c.freezeLm || languageLora(c)?.targets.length === 0 ? {} : { language: [language, ...experts] }),
	};
}

/** Signals that request a stop after the current step: those that batch systems send ahead of a time limit, and the launcher's end. */
function signalsOf(c: TrainingConfiguration): NodeJS.Signals[] {
	const place = placeFromEnvironment();
	const asked: NodeJS.Signals[] = c.exitSignalHandler ? ["SIGTERM", "SIGUSR1"] : [];
	return c.save !== null && place !== null && outlivesLauncher(place) ? [...asked, launcherEnded] : asked;
}

/** Listens for signals until it is disposed. */
export class ExitSignals implements Disposable {
	#asked: NodeJS.Signals | null = null;
	readonly #listener = (signal: NodeJS.Signals) => {
		this.#asked = signal;
	};

	constructor(private readonly signals: readonly NodeJS.Signals[]) {
		for (const signal of signals) process.on(signal, this.#listener);
	}

	/** The signal received so far, or null. Turns the event loop once, in which signals arrive. */
	async asked(): Promise<NodeJS.Signals | null> {
		await new Promise<void>((resolve) => setImmediate(resolve));
		return this.#asked;
	}

	[Symbol.dispose](): void {
		for (const signal of this.signals) process.off(signal, this.#listener);
	}
}
