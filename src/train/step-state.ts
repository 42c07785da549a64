/** The inputs, state and results of a training step. */
import type { ImageTextMicrobatch } from "../data/microbatch.ts";
import type { LossName } from "../guests/guest.ts";
import type { HybridModel } from "../models/language/model.ts";
import type { ParticipationResult } from "../observe/step-report.ts";
import type { StepPart, StepTimers } from "../observe/timers.ts";
import type { Optimizer } from "../optim/optimizer.ts";
import type { StepScalars } from "../optim/step-scalars.ts";
import type { DataParallel, Group } from "../parallel/index.ts";
import type { Action } from "../schedule/actions.ts";
import type { TokenSlice } from "../tensor/index.ts";
import type { LossMean } from "./loss-weights.ts";
import type { LossOwner } from "./losses.ts";
import type { Participation } from "./participation.ts";
import type { MicrobatchObserver, RankPasses } from "./rank-passes.ts";
import type { LossesByLayer } from "./report/router-report.ts";

/** The state that a step reads and updates. */
export interface TrainingState {
	/** Parameters and gradient reduction of each module on this rank. */
	readonly replicas: readonly DataParallel[];
	/**
	 * The language model's part on this rank, the group over which its routers are replicated, and its pipeline stages; null on
	 * ranks without it.
	 */
	readonly language: { readonly model: HybridModel; readonly routers: Group; readonly stages: Group } | null;
	/** Every rank of the run. */
	readonly world: Group;
	readonly passes: RankPasses;
	/** The ranks that compute the loss; null on ranks whose modules have none, which learn its token count last. */
	readonly lossOwner: LossOwner | null;
	/** All losses, in the order of the log; equal on every rank. */
	readonly lossNames: readonly LossName[];
	/** The loss is a mean over all tokens, or over microbatches. */
	readonly lossMean: LossMean;
	/** Data lanes of the language model. */
	readonly lanes: number;
	readonly optimizer: Optimizer;
	readonly scalars: StepScalars;
	/** Maximum global gradient norm; 0: no clipping. */
	readonly clipGrad: number;
	/** Seed of dropout masks, with the iteration. */
	readonly seed: number;
	/** null without an encoder. */
	readonly participation: Participation | null;
	readonly logNumZeros?: boolean;
	readonly logParametersNorm?: boolean;
}

export interface StepInput {
	/** This rank's microbatches. */
	readonly microbatches: readonly ImageTextMicrobatch[];
	/** This rank's microbatches of the next step, if known. */
	readonly upcoming?: readonly ImageTextMicrobatch[];
	/** Indices of the microbatches' tokens, in order, in the step's global batch; default: from 0. */
	readonly tokens?: TokenSlice;
	/** Number of steps before this one. */
	readonly iteration: number;
	readonly learningRate: number;
	readonly weightDecay: number;
}

export interface StepResult {
	/** Mean language model loss of a token. */
	readonly loss: number;
	/** Mean of each loss by name. */
	readonly losses: Readonly<Record<string, number>>;
	readonly tokens: number;
	/** Global gradient norm before clipping. */
	readonly gradientNorm: number;
	/** False if the gradient was not finite, so that the update was skipped. */
	readonly updated: boolean;
	/** Number of zero gradients; null unless the state requests it. */
	readonly zeroGradients: number | null;
	/** Norm of all parameters; null unless the state requests it. */
	readonly parametersNorm: number | null;
	/** Router losses by Megatron's name: means over layers and microbatches, before their coefficients. */
	readonly balancing: Readonly<Record<string, number>>;
	/** Router losses by layer; empty on ranks without the language model. */
	readonly balancingByLayer: LossesByLayer;
	/** null without an encoder. */
	readonly participation: ParticipationResult | null;
}

/** Callbacks during a step, for tests, parity checks and profiles. */
export interface StepObserver {
	readonly forward?: MicrobatchObserver;
	/**
	 * Called when gradients are final: those of the mean loss, not clipped. With it the scaling is done in memory rather than inside
	 * the optimizer, so the update may differ in its last bit.
	 */
	readonly gradients?: () => void;
	/** Called at the start of each part of the step. */
	readonly part?: (part: StepPart) => void;
	readonly timers?: StepTimers | undefined;
	/** Called before each action. */
	readonly action?: (action: Action) => void;
}

/** The results of a step that are known before its update. */
export type StepGradients = Omit<StepResult, "zeroGradients" | "parametersNorm">;
