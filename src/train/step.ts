/**
 * One training step, in the order of the algorithm:
 *
 *   takeGradients   zero gradients
 *                   every microbatch: encoder → image rows over the edge → language model → loss, and backward the same way
 *                   gradient sync: sums over the data-parallel replicas
 *                   routers: expert biases, balancing losses
 *                   global gradient norm and clip factor
 *   update          AdamW, Muon, parameter gather
 *
 * The loss of a microbatch is a sum over its tokens, and the norm and the optimizer divide gradients by the loss tokens of the step: the
 * gradient is that of the token mean, however the step is cut into microbatches and ranks (loss-weights.ts also has the mean of
 * the microbatches' means). Every rank of the run calls this together, whatever modules it holds; a rank takes part in what
 * concerns its modules.
 */
import { timed } from "../observe/timers.ts";
import { clipGradients, countZeros, parametersNorm, scaleGradients, sumSquares } from "../optim/gradient-norm.ts";
import type { Parameter } from "../tensor/index.ts";
import { LossWeights } from "./loss-weights.ts";
import { Losses, languageModelLoss, meansOf } from "./losses.ts";
import { participate, withNorms } from "./participation.ts";
import { type LossesByLayer, meanOfLayers, takeRouterLosses } from "./report/router-report.ts";
import type { StepGradients, StepInput, StepObserver, StepResult, TrainingState } from "./step-state.ts";

/** Trains on one global batch. Collective over the world. */
export function trainStep(state: TrainingState, input: StepInput, observer: StepObserver = {}): StepResult {
	return update(state, input, takeGradients(state, input, observer), observer);
}

/**
 * The part of a step before its update; the optimizer's scalars then hold the factors for the gradients. After this no rank waits
 * for another module until its next passes, so a module with a long update delays only itself.
 */
export function takeGradients(state: TrainingState, input: StepInput, observer: StepObserver = {}): StepGradients {
	const { replicas, world, scalars, lossOwner, participation } = state;
	const { part, timers } = observer;
	part?.("optimizer");
	for (const { parameters } of replicas) parameters.zeroGradients();
	const weights = new LossWeights(state.lossMean, { microbatches: input.microbatches.length, lanes: state.lanes });
	using losses = new Losses(scalars.device, lossOwner, state.lossNames, weights);
	part?.("compute");
	timers?.start("forward-backward");
	forwardBackward(state, input, losses, observer);
	part?.("wait");
	// The ranks of the language model agree on the loss tokens among themselves, and go on while other ranks still compute.
	const known = lossOwner ? losses.totalsOfOwner(lossOwner) : losses.totals(world);
	const scale = syncGradients(state, weights.scale(known.get(languageModelLoss)!.tokens), observer);
	part?.("optimizer");
	// A participation policy may still change the encoder's gradient: ranks with the encoder sum its squares after that.
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
	const partial = new Set(state.lossNames.filter(({ partial }) => partial).map(({ name }) => name));
	const means = meansOf(new Map([...totals].filter(([name, { tokens }]) => tokens > 0 || !partial.has(name))));
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

/** The step's update, from the gradients that takeGradients left. */
export function update(
	state: TrainingState,
	{ learningRate, weightDecay }: Pick<StepInput, "learningRate" | "weightDecay">,
	gradients: StepGradients,
	{ part, timers }: StepObserver = {},
): StepResult {
	const { replicas, world, optimizer, scalars } = state;
	scalars.set("learningRate", learningRate);
	scalars.set("weightDecay", weightDecay);
	// Before the update, which may overwrite gradients.
	const zeros = state.logNumZeros ? timed(timers, "optimizer-count-zeros", () => countZeros(replicas, world)) : null;
	timed(timers, "optimizer-inner-step", () => optimizer.step());
	part?.("gradients");
	timed(timers, "params-all-gather", () => {
		for (const replica of replicas) replica.gather();
	});
	timers?.stop("optimizer");
	part?.("other");
	return {
		...gradients,
		zeroGradients: zeros,
		parametersNorm: state.logParametersNorm ? parametersNorm(replicas, world) : null,
	};
}

/** Runs all microbatches forward and backward; gradient reductions have started on return. */
function forwardBackward(state: TrainingState, input: StepInput, losses: Losses, observer: StepObserver): void {
	const overlapping = state.replicas.filter(({ overlaps }) => overlaps);
	const onGradient = (parameter: Parameter) => {
		for (const replica of overlapping) replica.gradientReady(parameter);
	};
	const context = {
		iteration: input.iteration,
		dropoutKey: state.seed + input.iteration,
		tokens: input.tokens,
		upcoming: input.upcoming,
		timers: observer.timers,
		action: observer.action,
		waits: (waiting: boolean) => observer.part?.(waiting ? "bridge" : "compute"),
		...(overlapping.length > 0 && { onGradient }),
	};
	state.passes.train(input.microbatches, context, losses, observer.forward);
	// The actions of frozen modules contain no reduce, so theirs start here.
	for (const replica of state.replicas) replica.startSums();
}

/**
 * Waits for the sums of gradients over replicas. `scale`: the fp32 factor that makes them gradients of the mean loss; the part of it
 * that is still to be applied is returned.
 */
function syncGradients(
	{ replicas, scalars }: TrainingState,
	scale: number,
	{ part, timers, gradients }: StepObserver,
): number {
	part?.("gradients");
	timed(timers, "all-grads-sync", () => {
		for (const replica of replicas) replica.reduce();
	});
	if (!gradients) return scale;
	scaleGradients(replicas, scalars, scale);
	return 1;
}

/**
 * Updates expert biases and collects the router losses of all layers. Throws a UserError if experts had no room for their rows.
 */
function finishRouters({ language, passes }: TrainingState, { microbatches }: StepInput): LossesByLayer {
	if (language === null) return new Map();
	passes.requireRoomForRows();
	for (const router of language.model.routers.values()) router.finishStep(language.routers);
	const tokens = microbatches.reduce((sum, { text }) => sum + text.ids.length, 0);
	return takeRouterLosses(language.model, language, { microbatches: microbatches.length, tokens });
}
