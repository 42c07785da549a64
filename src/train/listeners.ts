/**
 * Listeners are called between the steps of a training and may end it: checkpoints, exits, tracing. Every rank has the
 * same listeners and calls them in the same order, so that they may communicate.
 */
import type { StepResult } from "./step.ts";

/** Progress of a training. */
export interface Progress {
	/** Steps done. */
	readonly iteration: number;
	/** Samples consumed, skipped updates included. */
	readonly consumedSamples: number;
	/** Samples of successful updates, which learning rate and weight decay follow. */
	readonly scheduledSamples: number;
	/** Samples consumed by evaluations. */
	readonly consumedValidSamples: number;
}

/** The beginning of a training. */
export const atTheStart: Progress = {
	iteration: 0,
	consumedSamples: 0,
	scheduledSamples: 0,
	consumedValidSamples: 0,
};

export interface StepEvent {
	/** After the step. */
	readonly progress: Progress;
	readonly result: StepResult;
	readonly learningRate: number;
	/** Learning rate of the next step. */
	readonly nextLearningRate: number;
	readonly weightDecay: number;
	/** Wall clock of the step, its data included. */
	readonly seconds: number;
}

/** A wish to end the training. All ranks must have the same at the same step. */
export interface Stop {
	/** Exit code; 0 where the training ends as asked. */
	readonly exitCode: number;
	/** A sentence for the user. */
	readonly reason: string;
	/** Whether a batch system is to be asked to start the job again. */
	readonly requeue?: boolean;
}

export interface Listener {
	/** `iteration`, from 1, is about to begin. */
	beforeStep?(iteration: number): void | Promise<void>;
	/**
	 * Called between a step's gradients and its update, where all ranks meet anyway: ranks that agree on something here
	 * do not wait for a module whose update takes longer.
	 */
	beforeUpdate?(): void | Promise<void>;
	/** After a step and its log line, before the evaluation it may be due for. */
	afterStep?(event: StepEvent): void | Promise<void>;
	/** After an evaluation of a step, over the same samples on every rank; null where it comes after the training. */
	afterEvaluation?(loss: number, iteration: number | null): void | Promise<void>;
	/** Between two steps, after the evaluation that the first may have been due for. */
	// biome-ignore lint/suspicious/noConfusingVoidType: listeners that do not end a training return nothing.
	betweenSteps?(progress: Progress): Stop | void | Promise<Stop | void>;
	/** After the last step, whether it was the planned one or a stop, before the last evaluation. */
	afterTraining?(progress: Progress): void | Promise<void>;
	/** Called when the run ends, in whatever way. */
	close?(): void | Promise<void>;
}
