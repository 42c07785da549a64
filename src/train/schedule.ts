/** Orders of forward and backward passes over the microbatches of a step. */
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { trainText } from "./language-microbatch.ts";
import type { LossAccumulator } from "./loss.ts";

/** What every microbatch of a step is told. */
export interface StepPlace {
	/** Key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** Index of this lane's first token among the tokens of the step's global batch. */
	readonly firstToken: number;
	/** Index of this rank's first image among those of the step's global batch; default 0. */
	readonly firstImage?: number;
}

/** Called with values as they arise and the microbatch, from 0, they belong to. */
export type MicrobatchObserver = (name: string, value: Tensor, microbatch: number) => void;

/** Runs all microbatches of a step forward and backward on this rank. */
export interface Schedule<Batch> {
	run(microbatches: readonly Batch[], place: StepPlace, losses: LossAccumulator, observe?: MicrobatchObserver): void;
}

/** The language model alone: each microbatch forward, then backward. */
export class LanguageSchedule implements Schedule<Microbatch> {
	constructor(readonly model: HybridModel) {}

	run(
		microbatches: readonly Microbatch[],
		place: StepPlace,
		losses: LossAccumulator,
		observe: MicrobatchObserver = () => {},
	): void {
		let { firstToken } = place;
		for (const [index, microbatch] of microbatches.entries()) {
			const look = (name: string, value: Tensor) => observe(name, value, index);
			trainText(this.model, microbatch, { ...place, firstToken }, losses, look);
			firstToken += microbatch.ids.length;
		}
	}
}
