/**
 * One training step, in the order of the algorithm: zero gradients → every microbatch forward and backward → sum over
 * replicas → global norm and clip | AdamW → gather. The norm and AdamW divide gradients by the loss tokens. The loss of a
 * microbatch is a sum over its tokens, so the gradient is that of the token mean over the whole step, however it is cut into
 * microbatches and ranks. Every rank of the run calls this together, whatever modules it holds.
 */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { Draw } from "../elastic/router/network.ts";
import type { ElasticRouter, SampledStep } from "../elastic/router/router.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { StepPart } from "../observe/step-clock.ts";
import { type StepTimers, timed } from "../observe/timers.ts";
import type { AdamW } from "../optim/adamw.ts";
import { clipGradients, countZeros, parametersNorm, scaleGradients, sumSquares } from "../optim/gradient-norm.ts";
import type { StepScalars } from "../optim/step-scalars.ts";
import type { DataParallel } from "../parallel/data-parallel.ts";
import type { Group } from "../parallel/group.ts";
import type { Action } from "../schedule/actions.ts";
import type { Parameter } from "../tensor/parameter.ts";
import type { TokenSlice } from "../tensor/token-slice.ts";
import { isBudgetLoss, Losses, type LossOwner, languageModelLoss, lossTokens, meansOf } from "./losses.ts";
import { type Participation, type ParticipationResult, participate, withNorms } from "./participation.ts";
import type { MicrobatchObserver, RankPasses } from "./rank-passes.ts";
import { type LossesByLayer, meanOfLayers, takeRouterLosses } from "./report/router-report.ts";

/** A router, and the draw of a microbatch of this rank's lane by iteration and number. */
export interface ElasticTraining {
	readonly router: ElasticRouter;
	readonly draw: (iteration: number, microbatch: number) => Draw;
}

/** State that a step reads and changes; on ranks without the language model `language` is null. */
export interface TrainingState {
	/** Parameters of the modules on this rank, each among its replicas. */
	readonly replicas: readonly DataParallel[];
	/** The language model's part, the ranks with the same routers, and the stages of its pipeline. */
	readonly language: { readonly model: HybridModel; readonly routers: Group; readonly stages: Group } | null;
	/** An elastic model's router, and what its microbatches draw; null: the model is not elastic, or not here. */
	readonly elastic: ElasticTraining | null;
	/** Every rank of the run. */
	readonly world: Group;
	readonly passes: RankPasses;
	/** The ranks that compute the loss; null on ranks whose modules have no loss, which receive its token count last. */
	readonly lossOwner: LossOwner | null;
	/** Names of the losses, on every rank. */
	readonly lossNames: readonly string[];
	readonly optimizer: AdamW;
	readonly scalars: StepScalars;
	/** Global norm limit; 0: no limit. */
	readonly clipGrad: number;
	/** Keys of dropout masks are drawn from this and the iteration. */
	readonly seed: number;
	/** The participation policy and the votes of encoder ranks; null without an encoder. */
	readonly participation: Participation | null;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

export interface StepInput {
	/** This rank's. */
	readonly microbatches: readonly ImageTextMicrobatch[];
	/** This rank's microbatches of the step after, where they are known. */
	readonly upcoming?: readonly ImageTextMicrobatch[];
	/** The microbatches' tokens, in order, among those of the step's global batch; default: from its first on. */
	readonly tokens?: TokenSlice;
	/** Steps before this one. */
	readonly iteration: number;
	readonly learningRate: number;
	readonly weightDecay: number;
}

export interface StepResult {
	/** Mean loss of a token. */
	readonly loss: number;
	/** Every loss by name, means of a token. */
	readonly losses: Readonly<Record<string, number>>;
	readonly tokens: number;
	/** Before clipping. */
	readonly gradientNorm: number;
	/** False when the gradient was not finite and nothing was updated. */
	readonly updated: boolean;
	/** Zeros among the gradients; null unless the state asks for them. */
	readonly zeroGradients: number | null;
	/** Norm of all parameters; null unless the state asks for it. */
	readonly parametersNorm: number | null;
	/** Balancing losses by Megatron's name: mean over layers and microbatches, before their coefficients. */
	readonly balancing: Readonly<Record<string, number>>;
	/** Balancing losses of each layer; empty on ranks without the language model. */
	readonly balancingByLayer: LossesByLayer;
	/** null without an encoder. */
	readonly participation: ParticipationResult | null;
}

/** Looks into a step: values as they arise, gradients before the update. */
export interface StepObserver {
	readonly forward?: MicrobatchObserver;
	/**
	 * Called when gradients are final (divided by the loss tokens, not clipped). For this they are divided in memory, which AdamW
	 * otherwise does as it clips: the update may differ in its last bit.
	 */
	readonly gradients?: () => void;
	/** Called when another part of the step begins. */
	readonly part?: (part: StepPart) => void;
	readonly timers?: StepTimers | undefined;
	/** Called before every action of the passes. */
	readonly action?: (action: Action) => void;
}

/** Trains on one global batch. */
export function trainStep(state: TrainingState, input: StepInput, observer: StepObserver = {}): StepResult {
	return update(state, input, takeGradients(state, input, observer), observer);
}

/** Results of a step before its update. */
export type StepGradients = Omit<StepResult, "zeroGradients" | "parametersNorm">;

/**
 * Everything in a step before its update; afterwards the optimizer's scalars hold the factors for the gradients. From
 * here to the end of its next passes a rank does not wait for other modules: a long update holds up only its own
 * module.
 */
export function takeGradients(state: TrainingState, input: StepInput, observer: StepObserver = {}): StepGradients {
	const { replicas, world, scalars, lossOwner, participation } = state;
	const { part, timers } = observer;
	part?.("optimizer");
	for (const { parameters } of replicas) parameters.zeroGradients();
	using losses = new Losses(scalars.device, lossOwner, state.lossNames);
	part?.("compute");
	timers?.start("forward-backward");
	runPasses(state, input, losses, observer);
	part?.("wait");
	// Ranks of the loss know it before all others have done their passes.
	const known = lossOwner ? losses.totalsOfOwner(lossOwner) : losses.totals(world);
	const scale = reduce(state, known.get(languageModelLoss)!.tokens, observer);
	part?.("optimizer");
	if (!participation?.replica) sumSquares(replicas, scalars);
	const balancingByLayer = finishRouters(state, input);
	part?.("wait");
	const totals = lossOwner ? losses.totals(world) : known;
	const participated = participation && participate(participation, input.microbatches, scalars, scale, world);
	timers?.stop("forward-backward");
	observer.gradients?.();
	part?.("optimizer");
	timers?.start("optimizer");
	timed(timers, "optimizer-clip-main-grad", () => {
		if (participation?.replica) sumSquares(replicas, scalars);
		clipGradients(scalars, scale, state.clipGrad, world);
	});
	const { gradientNorm, foundInf } = scalars.read();
	const means = meansOf(new Map([...totals].filter(([name, { tokens }]) => tokens > 0 || !isBudgetLoss(name))));
	return {
		loss: means[languageModelLoss]!,
		losses: means,
		tokens: totals.get(languageModelLoss)!.tokens,
		gradientNorm,
		updated: foundInf === 0,
		balancing: meanOfLayers(balancingByLayer),
		balancingByLayer,
		participation: participated && withNorms(participated, gradientNorm),
	};
}

/** The step's update, from the gradients that takeGradients has left. */
export function update(
	state: TrainingState,
	{ learningRate, weightDecay }: Pick<StepInput, "learningRate" | "weightDecay">,
	gradients: StepGradients,
	{ part, timers }: StepObserver = {},
): StepResult {
	const { replicas, world, optimizer, scalars } = state;
	scalars.set("learningRate", learningRate);
	scalars.set("weightDecay", weightDecay);
	timed(timers, "optimizer-inner-step", () => optimizer.step());
	part?.("gradients");
	timed(timers, "params-all-gather", () => {
		for (const replica of replicas) replica.gather();
	});
	timers?.stop("optimizer");
	part?.("other");
	return {
		...gradients,
		zeroGradients: state.logNumZeros ? timed(timers, "optimizer-count-zeros", () => countZeros(replicas, world)) : null,
		parametersNorm: state.logParametersNorm ? parametersNorm(replicas, world) : null,
	};
}

/** All microbatches forward and backward; the sums of gradients over replicas have begun. */
function runPasses(state: TrainingState, input: StepInput, losses: Losses, observer: StepObserver): void {
	const overlapping = state.replicas.filter(({ overlaps }) => overlaps);
	const onGradient = (parameter: Parameter) => {
		for (const replica of overlapping) replica.gradientReady(parameter);
	};
	using sampled = sampleStep(state, input);
	const place = {
		elastic: sampled?.microbatches,
		dropoutKey: state.seed + input.iteration,
		tokens: input.tokens,
		upcoming: input.upcoming,
		timers: observer.timers,
		action: observer.action,
		waits: (waiting: boolean) => observer.part?.(waiting ? "bridge" : "compute"),
		...(overlapping.length > 0 && { onGradient }),
	};
	state.passes.train(input.microbatches, place, losses, observer.forward);
	if (sampled) state.elastic!.router.addGradients(sampled, budgetWeights(state, input));
	// Frozen modules have no backward passes, and their lists no sums.
	for (const replica of state.replicas) replica.startSums();
}

/** Samples of this rank's microbatches; null: the model is not elastic, or not here. */
function sampleStep({ elastic }: TrainingState, { microbatches, iteration }: StepInput): SampledStep | null {
	if (elastic === null) return null;
	const draws = microbatches.map((_, microbatch) => elastic.draw(iteration, microbatch));
	return elastic.router.sample(draws, iteration, { trains: true });
}

/** Weights of the microbatches' budget losses on this rank: their loss tokens, on the rank that counts their loss, else 0. */
function budgetWeights({ elastic, lossOwner }: TrainingState, { microbatches }: StepInput): number[] {
	const { lossWeight } = elastic!.router.config;
	return microbatches.map(({ text }) => (lossOwner?.counts ? lossWeight * lossTokens(text) : 0));
}

/** Sums gradients over replicas. Returns the factor, in fp32, that makes them gradients of the mean over the step's loss tokens. */
function reduce(
	{ replicas, scalars }: TrainingState,
	tokens: number,
	{ part, timers, gradients }: StepObserver,
): number {
	part?.("gradients");
	timed(timers, "all-grads-sync", () => {
		for (const replica of replicas) replica.reduce();
	});
	const scale = Math.fround(1 / Math.max(1, tokens));
	if (!gradients) return scale;
	scaleGradients(replicas, scalars, scale);
	return 1;
}

/** Updates expert biases and takes the balancing losses of all layers. Throws where experts of a layer lacked room. */
function finishRouters({ language, passes }: TrainingState, { microbatches }: StepInput): LossesByLayer {
	if (language === null) return new Map();
	passes.requireRoomForRows();
	for (const router of language.model.routers.values()) router.finishStep(language.routers);
	const tokens = microbatches.reduce((sum, { text }) => sum + text.ids.length, 0);
	return takeRouterLosses(language.model, language, { microbatches: microbatches.length, tokens });
}
