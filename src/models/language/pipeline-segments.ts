/** Pipeline segments of the layer pattern (docs/spec/language-model.md §1.3): each is the layers of one model chunk. */

/** Layers [begin, end); may be empty. */
export interface PipelineSegment {
	readonly begin: number;
	readonly end: number;
	/** Whether the embedding precedes them: in the first segment. */
	readonly embeds: boolean;
	/** Whether the final norm and the output layer follow them: in the last segment. */
	readonly hasHead: boolean;
}

export function wholeModel(layers: number): PipelineSegment {
	return { begin: 0, end: layers, embeds: true, hasHead: true };
}

/** Segments of the given numbers of layers, in order. */
export function segmentsOf(lengths: readonly number[]): PipelineSegment[] {
	let begin = 0;
	return lengths.map((length, index) => {
		begin += length;
		return { begin: begin - length, end: begin, embeds: index === 0, hasHead: index === lengths.length - 1 };
	});
}

/** Layers [begin, end) of each block of a segment. `lengths`: of all blocks of the model, which no segment splits. */
export function blocksOf(
	lengths: readonly number[],
	segment: PipelineSegment,
): { readonly begin: number; readonly end: number }[] {
	let end = 0;
	return lengths
		.map((length) => {
			end += length;
			return { begin: end - length, end };
		})
		.filter((block) => block.begin >= segment.begin && block.end <= segment.end);
}

/** The segments of stage `stage` of `stages`: every `stages`-th. */
export function segmentsOfStage(
	segments: readonly PipelineSegment[],
	stage: number,
	stages: number,
): PipelineSegment[] {
	return segments.filter((_, index) => index % stages === stage);
}
