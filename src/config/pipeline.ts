/** How a layer pattern is cut for a pipeline (language-model.md §1.2, §1.3). */
import { parseSegments } from "./hybrid-pattern.ts";

/**
 * Layers of every segment, in order: where the pattern is cut by |, or equal ones, one a stage. One stage takes the whole
 * pattern at once. Lengths of a pattern that checkPipeline refuses mean nothing.
 */
export function segmentLengths(pattern: string, stages: number): number[] {
	const segments = parseSegments(pattern).map(({ length }) => length);
	const layers = segments.reduce((sum, length) => sum + length, 0);
	if (stages === 1) return [layers];
	return segments.length > 1 ? segments : new Array<number>(stages).fill(Math.floor(layers / stages));
}

/** The end of a sentence that starts with "allowed is": why so many stages cannot hold the pattern; null: they can. */
export function pipelineObjection(pattern: string, stages: number): string | null {
	if (stages === 1) return null;
	const segments = parseSegments(pattern);
	const layers = segments.flat().length;
	if (segments.length > 1) {
		if (segments.length % stages === 0) return null;
		return `a divisor of the ${segments.length} segments into which | cuts hybrid-layer-pattern`;
	}
	if (layers % stages === 0) return null;
	return `a divisor of its ${layers} layers where no | in hybrid-layer-pattern cuts them into segments`;
}
