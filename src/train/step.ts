/**
 * One training step, in the order of the algorithm: zero gradients → every microbatch forward and backward → sum over
 * replicas → divide by the loss tokens → global norm and clip | AdamW → gather. The loss of a microbatch is a sum over
 * its tokens, so the gradient is that of the token mean over the whole step, however it is cut into microbatches and
 * ranks. Every rank of the run calls this together, whatever module it holds.
 */
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { RouterState } from "../models/hybrid/router-state.ts";
import type { StepPart } from "../observe/step-clock.ts";
import { type StepTimers, timed } from "../observe/timers.ts";
import type { AdamW } from "../optim/adamw.ts";
import {
	clipGradients,
	countZeros,
	gradientSquares,
	parametersNorm,
	scaleGradients,
	sumSquares,
} from "../optim/gradient-norm.ts";
import type { StepScalars } from "../optim/step-scalars.ts";
import { type DataParallel, onlyReplica } from "../parallel/data-parallel.ts";
import { type Group, groupOfOne } from "../parallel/group.ts";
import type { Parameter } from "../tensor/parameter.ts";
import { Tensor } from "../tensor/tensor.ts";
import { LossAccumulator } from "./loss.ts";
import { type Participation, type ParticipationResult, participationFactor } from "./participation.ts";
import { LanguageSchedule, type MicrobatchObserver, type Schedule } from "./schedule.ts";

export interface TrainingState<Batch> {
	/** Parameters of the modules on this rank, each among its replicas. */
	readonly replicas: readonly DataParallel[];
	/** Routers of the language model on this rank, and the ranks that share their tokens and replicate them. */
	readonly routers: readonly RouterState[];
	readonly routerGroup: Group;
	/** Every rank of the run. */
	readonly world: Group;
	readonly schedule: Schedule<Batch>;
	/** Whether this rank's losses count: of the language ranks that share tokens, one. */
	readonly countsLoss: boolean;
	/**
	 * Where encoder and language model live on different ranks, all ranks of the language model: they know the step's loss
	 * tokens first, and have their gradients ready before the encoder has done its passes.
	 */
	readonly lossGroup?: Group;
	readonly optimizer: AdamW;
	readonly scalars: StepScalars;
	/** Global norm limit; 0: none. */
	readonly clipGrad: number;
	/** Keys of dropout masks are drawn from this and the iteration. */
	readonly seed: number;
	/** Encoder and language model on different ranks: which encoder ranks saw images, and what that changes. */
	readonly participation?: Participation;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

/** A state of a language model in one process. */
export function singleProcess(
	state: { readonly model: HybridModel } & Pick<
		TrainingState<Microbatch>,
		"optimizer" | "scalars" | "clipGrad" | "seed" | "logNumZeros" | "logParametersNorm"
	>,
): TrainingState<Microbatch> {
	const { model, ...rest } = state;
	return {
		...rest,
		replicas: [onlyReplica(model.parameters)],
		routers: [...model.routers.values()],
		routerGroup: groupOfOne("language.tp_dp", 0),
		world: groupOfOne("world", 0),
		schedule: new LanguageSchedule(model),
		countsLoss: true,
	};
}

export interface StepInput<Batch> {
	/** This rank's. */
	readonly microbatches: readonly Batch[];
	/** Index of this lane's first token among those of the step's global batch; 0 with one lane. */
	readonly firstToken?: number;
	/** Steps before this one. */
	readonly iteration: number;
	readonly learningRate: number;
	readonly weightDecay: number;
}

export interface StepResult {
	/** Mean loss of a token. */
	readonly loss: number;
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
	/** The same of each router, in the order of the state's routers. */
	readonly balancingByRouter: readonly Readonly<Record<string, number>>[];
	/** null unless the state asks for it. */
	readonly participation: ParticipationResult | null;
}

/** Looks into a step: values as they arise, gradients before the update. */
export interface StepObserver {
	readonly forward?: MicrobatchObserver;
	/** Called when gradients are final (divided by the loss tokens, not clipped). */
	readonly gradients?: () => void;
	/** Called when another part of the step begins. */
	readonly part?: (part: StepPart) => void;
	readonly timers?: StepTimers | undefined;
}

/** Trains on one global batch. */
export function trainStep<Batch>(
	state: TrainingState<Batch>,
	input: StepInput<Batch>,
	observer: StepObserver = {},
): StepResult {
	return update(state, input, takeGradients(state, input, observer), observer);
}

/** What a step knows before its update. */
export type StepGradients = Omit<StepResult, "zeroGradients" | "parametersNorm">;

/**
 * All of a step before its update: the optimizer's scalars say what to do with the gradients. Nothing that a rank does
 * from its return to the end of its next passes concerns another module: a rank whose update takes long keeps none waiting.
 */
export function takeGradients<Batch>(
	state: TrainingState<Batch>,
	input: StepInput<Batch>,
	observer: StepObserver = {},
): StepGradients {
	const { replicas, routers, routerGroup, lossGroup = null, world, scalars } = state;
	const { timers } = observer;
	observer.part?.("optimizer");
	for (const { parameters } of replicas) parameters.zeroGradients();
	using losses = new LossAccumulator(scalars.device, state.countsLoss);
	const overlapping = replicas.filter(({ overlaps }) => overlaps);
	const place = {
		dropoutKey: state.seed + input.iteration,
		firstToken: input.firstToken ?? 0,
		timers,
		...(overlapping.length > 0 && {
			onGradient: (parameter: Parameter) => {
				for (const replica of overlapping) replica.gradientReady(parameter);
			},
		}),
	};
	/** Gradients of the mean of the step's loss tokens. */
	const reduce = (tokens: number) => {
		observer.part?.("gradients");
		timed(timers, "all-grads-sync", () => {
			for (const replica of replicas) replica.reduce();
		});
		scalars.set("gradientScale", 1 / Math.max(1, tokens));
		scaleGradients(replicas, scalars);
	};
	const finishRouters = () => {
		for (const router of routers) router.finishStep(routerGroup);
		return routers.map((router) => router.takeLosses(routerGroup, losses.microbatches, losses.tokens));
	};
	observer.part?.("compute");
	timers?.start("forward-backward");
	state.schedule.run(input.microbatches, place, losses, observer.forward);
	// Before the loss tokens, which other ranks have a part in.
	for (const replica of replicas) replica.startSums();
	let balancingByRouter: StepResult["balancingByRouter"] = [];
	if (lossGroup !== null) {
		observer.part?.("wait");
		reduce(losses.totalOfPart(lossGroup).tokens);
		observer.part?.("optimizer");
		sumSquares(replicas, scalars);
		balancingByRouter = finishRouters();
	}
	observer.part?.("wait");
	const { sum, tokens } = losses.total(world);
	if (lossGroup === null) reduce(tokens);
	const participation = state.participation ? participate(state, state.participation, losses) : null;
	timers?.stop("forward-backward");
	observer.gradients?.();
	observer.part?.("optimizer");
	if (lossGroup === null) balancingByRouter = finishRouters();
	timers?.start("optimizer");
	timed(timers, "optimizer-clip-main-grad", () => {
		if (lossGroup === null) sumSquares(replicas, scalars);
		clipGradients(scalars, state.clipGrad, world);
	});
	const { gradientNorm, foundInf } = scalars.read();
	return {
		loss: sum / Math.max(1, tokens),
		tokens,
		gradientNorm,
		updated: foundInf === 0,
		balancing: meanOfRouters(balancingByRouter),
		balancingByRouter,
		participation: participation && withNorms(participation, gradientNorm),
	};
}

/** The step's update, from the gradients that takeGradients has left. */
export function update<Batch>(
	state: TrainingState<Batch>,
	{ learningRate, weightDecay }: Pick<StepInput<Batch>, "learningRate" | "weightDecay">,
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

/** Multiplies the encoder's gradients, before the global norm is taken. */
function scaleEncoder(replica: DataParallel, factor: number, scalars: StepScalars): void {
	scalars.set("gradientScale", factor);
	scaleGradients([replica], scalars);
}

interface Participated {
	readonly policy: Participation["policy"];
	readonly participants: number;
	readonly ranks: number;
	/** Σ g² of the encoder's exact gradient over all its ranks. */
	readonly squares: number;
}

/** Counts the encoder ranks that saw images, and corrects the encoder's gradient where the policy says so. */
function participate(
	{ scalars, world }: Pick<TrainingState<unknown>, "scalars" | "world">,
	{ policy, ranks, replica, votes }: Participation,
	losses: LossAccumulator,
): Participated {
	const own = [votes && losses.sawImages ? 1 : 0, replica ? gradientSquares([replica], scalars) : 0];
	using sums = Tensor.from(scalars.device, Float64Array.from(own));
	world.allReduce(sums).wait();
	const totals = new Float64Array(2);
	scalars.device.copyToHost(totals, sums);
	const [participants, squares] = totals as unknown as [number, number];
	const factor = participationFactor(participants, ranks);
	if (policy === "corrected" && replica && factor !== 1) scaleEncoder(replica, factor, scalars);
	return { policy, participants, ranks, squares };
}

/** The norms under both policies from that of the one in force. */
function withNorms({ policy, participants, ranks, squares }: Participated, norm: number): ParticipationResult {
	const change = (participationFactor(participants, ranks) ** 2 - 1) * squares;
	const other = Math.sqrt(Math.max(0, norm ** 2 + (policy === "exact" ? change : -change)));
	const [exactNorm, correctedNorm] = policy === "exact" ? [norm, other] : [other, norm];
	return { participants, ranks, exactNorm, correctedNorm };
}

function meanOfRouters(routers: StepResult["balancingByRouter"]): Record<string, number> {
	const sums: Record<string, number> = {};
	for (const losses of routers) {
		for (const [name, value] of Object.entries(losses)) sums[name] = (sums[name] ?? 0) + value / routers.length;
	}
	return sums;
}
