/** Orders of forward and backward passes over the microbatches of a step. */
import type { Microbatch } from "../data/microbatch.ts";
import type { HybridModel } from "../models/hybrid/model.ts";
import type { StepTimers } from "../observe/timers.ts";
import type { Parameter } from "../tensor/parameter.ts";
import type { Tensor } from "../tensor/tensor.ts";
import { type DecodingLimits, decodeGreedily, splitIds } from "./generate.ts";
import { evaluateText, trainText } from "./language-microbatch.ts";
import type { LossAccumulator } from "./loss.ts";

/** What every microbatch of a step is told. */
export interface StepPlace {
	/** Key of the step's dropout masks. */
	readonly dropoutKey: number;
	/** Index of this lane's first token among the tokens of the step's global batch. */
	readonly firstToken: number;
	/** Called when the step's last microbatch has completed a parameter's gradient; absent: nobody wants to know. */
	readonly onGradient?: (parameter: Parameter) => void;
	/** Measures the parts of every microbatch. */
	readonly timers?: StepTimers | undefined;
}

/** What the tape of microbatch `index` of `count` tells about gradients: those of the last one are complete. */
export function gradientListener(
	{ onGradient }: StepPlace,
	index: number,
	count: number,
): Pick<StepPlace, "onGradient"> {
	return onGradient && index === count - 1 ? { onGradient } : {};
}

/** Called with values as they arise and the microbatch, from 0, they belong to. */
export type MicrobatchObserver = (name: string, value: Tensor, microbatch: number) => void;

/** Runs all microbatches of a step forward and backward on this rank. */
export interface Schedule<Batch> {
	run(microbatches: readonly Batch[], place: StepPlace, losses: LossAccumulator, observe?: MicrobatchObserver): void;
	/** Hears before a step what the step after it will be given, where that is known. */
	expect?(upcoming: readonly Batch[]): void;
}

/** Runs microbatches forward only: no dropout, routers do not count. */
export interface Evaluator<Batch> {
	evaluate(microbatches: readonly Batch[], losses: LossAccumulator, observe?: MicrobatchObserver): void;
}

/** Continues prompts greedily: what follows each, sample after sample; nothing on ranks of the encoder. */
export interface Decoder<Batch> {
	decode(prompts: readonly Batch[], limits: DecodingLimits): number[][];
}

/** The language model alone: each microbatch forward, then backward. */
export class LanguageSchedule implements Schedule<Microbatch>, Evaluator<Microbatch>, Decoder<Microbatch> {
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
			const { dropoutKey, timers } = place;
			const own = { dropoutKey, firstToken, timers, ...gradientListener(place, index, microbatches.length) };
			trainText(this.model, microbatch, own, losses, look);
			firstToken += microbatch.ids.length;
		}
	}

	evaluate(microbatches: readonly Microbatch[], losses: LossAccumulator, observe: MicrobatchObserver = () => {}): void {
		for (const [index, microbatch] of microbatches.entries()) {
			evaluateText(this.model, microbatch, losses, (name, value) => observe(name, value, index));
		}
	}

	decode(prompts: readonly Microbatch[], limits: DecodingLimits): number[][] {
		return prompts.flatMap((text) =>
			decodeGreedily(this.model, { ids: splitIds(text), rows: null, imageTokenId: -1 }, limits),
		);
	}
}
