/** How a layer pattern is cut for a pipeline (docs/spec/language-model.md §1.2, §1.3, §1.4). */
import { type Block, parsePattern, symbolsOf } from "./hybrid-pattern.ts";

const layersOf = (blocks: readonly Block[]) => blocks.reduce((sum, { length }) => sum + length, 0);

/**
 * Layers of every pipeline segment, in order: those between the pattern's |, or one equal segment a stage. A single stage has
 * one segment. Meaningless for a pattern that pipelineObjection refuses.
 */
export function segmentLengths(pattern: string, stages: number): number[] {
	const segments = parsePattern(pattern).segments.map(layersOf);
	const layers = segments.reduce((sum, length) => sum + length, 0);
	if (stages === 1) return [layers];
	return segments.length > 1 ? segments : new Array<number>(stages).fill(Math.floor(layers / stages));
}

/** The end of a sentence that starts with "allowed is": why so many stages cannot hold the pattern; null: they can. */
export function pipelineObjection(pattern: string, stages: number): string | null {
	if (stages === 1) return null;
	const { segments } = parsePattern(pattern);
	if (segments.length > 1) {
		if (segments.length % stages === 0) return null;
		return `a divisor of the ${segments.length} segments into which | cuts hybrid-layer-pattern`;
	}
	const blocks = segments[0]!;
	const layers = layersOf(blocks);
	if (layers % stages !== 0)
		return `a divisor of its ${layers} layers where no | in hybrid-layer-pattern cuts them into segments`;
	let begin = 0;
	for (const block of blocks) {
		const cut = Math.ceil((begin + 1) / (layers / stages)) * (layers / stages);
		if (cut < begin + block.length) {
			const group = `[${symbolsOf(block)}] of layers ${begin} to ${begin + block.length - 1}`;
			return `a number of equal stages that cuts no group; ${stages} would cut ${group}: say with | where stages begin`;
		}
		begin += block.length;
	}
	return null;
}
