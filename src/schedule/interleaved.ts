/**
 * Interleaved 1F1B: a stage holds V chunks, P apart. A group of G microbatches passes its first chunk, then its second, …,
 * before the next group begins, so that the pipeline fills and empties V times as fast: it idles (P − 1) / V microbatches
 * instead of P − 1, and has more of them under way.
 */
import { languageChunk, type PassAction } from "./actions.ts";

export interface InterleavedShape {
	/** P and V. */
	readonly stages: number;
	readonly virtualStages: number;
	readonly microbatches: number;
	/** G; microbatches left over at the end, if fewer than P, join the last group. */
	readonly groupSize: number;
}

/** Passes of one stage; it begins with `more` forward passes than it must. */
export function interleaved(shape: InterleavedShape, stage: number, more = 0): PassAction[] {
	const { stages, virtualStages } = shape;
	const groups = groupsOf(shape);
	const order = groups.flatMap((group) =>
		Array.from({ length: virtualStages }, (_, turn) => group.map((microbatch) => ({ turn, microbatch }))).flat(),
	);
	const warmUp = interleavedWarmUp(shape, stage, more);
	const passOf = (kind: PassAction["kind"], at: number): PassAction => {
		const { turn, microbatch } = order[at]!;
		const virtual = kind === "forward" ? turn : virtualStages - 1 - turn;
		return { kind, chunk: languageChunk(virtual * stages + stage), microbatch };
	};
	const passes: PassAction[] = [];
	for (let at = 0; at < order.length + warmUp; at++) {
		if (at < order.length) passes.push(passOf("forward", at));
		if (at >= warmUp) passes.push(passOf("backward", at - warmUp));
	}
	return passes;
}

/** Forward passes of a stage before its first backward pass, less the one that comes with it. */
export function interleavedWarmUp(shape: InterleavedShape, stage: number, more = 0): number {
	const { stages, virtualStages, microbatches } = shape;
	const largest = Math.max(...groupsOf(shape).map(({ length }) => length));
	return Math.min(2 * (stages - stage - 1) + (virtualStages - 1) * largest + more, microbatches * virtualStages);
}

/** Microbatches that take their turns together. */
function groupsOf({ stages, microbatches, groupSize }: InterleavedShape): number[][] {
	const groups: number[][] = [];
	for (let first = 0, end = 0; first < microbatches; first = end) {
		end = first + groupSize;
		// A group smaller than the pipeline is long would leave stages waiting for each other.
		if (end + stages > microbatches) end = microbatches;
		groups.push(Array.from({ length: end - first }, (_, index) => first + index));
	}
	return groups;
}
