/**
 * Interleaved 1F1B with P stages and V virtual stages: stage p holds chunks p, p + P, … A group of G microbatches passes the stage's
 * first chunk, then its second, …, before the next group begins. The bubble shrinks from P − 1 microbatches to (P − 1) / V, and
 * more microbatches are in flight.
 */
import type { PassAction } from "./actions.ts";

export interface InterleavedShape {
	/** Name of the module that is cut into stages. */
	readonly pipeline: string;
	/** P and V. */
	readonly stages: number;
	readonly virtualStages: number;
	readonly microbatches: number;
	/** G; microbatches left over at the end, if fewer than P, join the last group. */
	readonly groupSize: number;
}

/** Passes of one stage; it begins with `extra` forward passes beside those it needs. */
export function interleaved(shape: InterleavedShape, stage: number, extra = 0): PassAction[] {
	const { stages, virtualStages } = shape;
	const groups = groupsOf(shape);
	const order = groups.flatMap((group) =>
		Array.from({ length: virtualStages }, (_, turn) => group.map((microbatch) => ({ turn, microbatch }))).flat(),
	);
	const warmUp = interleavedWarmUp(shape, stage, extra);
	const passOf = (kind: PassAction["kind"], at: number): PassAction => {
		const { turn, microbatch } = order[at]!;
		const virtual = kind === "forward" ? turn : virtualStages - 1 - turn;
		return { kind, chunk: { module: shape.pipeline, index: virtual * stages + stage }, microbatch };
	};
	const passes: PassAction[] = [];
	for (let at = 0; at < order.length + warmUp; at++) {
		if (at < order.length) passes.push(passOf("forward", at));
		if (at >= warmUp) passes.push(passOf("backward", at - warmUp));
	}
	return passes;
}

/** Number of a stage's warm-up forward passes: those before its first forward-backward pair. */
export function interleavedWarmUp(shape: InterleavedShape, stage: number, extra = 0): number {
	const { stages, virtualStages, microbatches } = shape;
	const largest = Math.max(...groupsOf(shape).map(({ length }) => length));
	return Math.min(2 * (stages - stage - 1) + (virtualStages - 1) * largest + extra, microbatches * virtualStages);
}

/** The ranges [begin, end) of microbatches of each group. */
function groupsOf({ stages, microbatches, groupSize }: InterleavedShape): number[][] {
	const groups: number[][] = [];
	for (let first = 0, end = 0; first < microbatches; first = end) {
		end = first + groupSize;
		// A group of fewer microbatches than stages would stall the pipeline.
		if (end + stages > microbatches) end = microbatches;
		groups.push(Array.from({ length: end - first }, (_, index) => first + index));
	}
	return groups;
}
