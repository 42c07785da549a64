/**
 * Callbacks between the steps of a training, which may end it: checkpoints, exit conditions, profiling. Every rank has the same
 * listeners and calls them in the same order, so they may communicate.
 */
import type { Kept } from "../guests/guest.ts";
import type { StepResult } from "./step-state.ts";

/** Progress of a training. */
export interface Progress {
	/** Steps done. */
	readonly iteration: number;
	/** Samples consumed, skipped updates included. */
	readonly consumedSamples: number;
	/** Samples of steps that updated the weights, by which learning rate and weight decay are scheduled. */
	readonly scheduledSamples: number;
	/** Samples consumed by evaluations. */
	readonly consumedValidSamples: number;
	/** Values that guests keep for the steps that follow. */
	readonly kept: Kept;
}

/** Progress of a training that has not started. */
export const atTheStart: Progress = {
	iteration: 0,
	consumedSamples: 0,
	scheduledSamples: 0,
	consumedValidSamples: 0,
	kept: {},
};

export interface StepEvent {
	/** Progress after the step. */
	readonly progress: Progress;
	readonly result: StepResult;
	readonly learningRate: number;
	/** Learning rate of the next step. */
	readonly nextLearningRate: number;
	readonly weightDecay: number;
	/** Wall-clock seconds of the step, reading its data included. */
	readonly seconds: number;
}

/** A request to end the training. All ranks must return the same at the same step. */
export interface Stop {
	/** Exit code; 0 where the training ends as asked. */
	readonly exitCode: number;
	/** A sentence for the user. */
	readonly reason: string;
	/** Whether the batch system is asked to requeue the job. */
	readonly requeue?: boolean;
}

export interface Listener {
	/** Before step `iteration`, counted from 1. */
	beforeStep?(iteration: number): void | Promise<void>;
	/**
	 * Between a step's gradients and its update. All ranks synchronise there anyway, so a collective here does not wait for a
	 * module with a longer update.
	 */
	beforeUpdate?(): void | Promise<void>;
	/** After a step and its log line, before an evaluation. */
	afterStep?(event: StepEvent): void | Promise<void>;
	/** After an evaluation, with its mean loss; `iteration` null: the final evaluation, after the training. */
	afterEvaluation?(loss: number, iteration: number | null): void | Promise<void>;
	/** Between two steps, after an evaluation. */
	// biome-ignore lint/suspicious/noConfusingVoidType: listeners that do not end a training return nothing.
	betweenSteps?(progress: Progress): Stop | void | Promise<Stop | void>;
	/** After the last step, planned or not, before the final evaluation. */
	afterTraining?(progress: Progress): void | Promise<void>;
	/** When the run ends, for whatever reason. */
	close?(): void | Promise<void>;
}
