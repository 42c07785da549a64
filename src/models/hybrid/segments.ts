/** How the layers of the language model are cut into the runs that pipeline stages pass at once (spec language-model 1.3). */

/** Layers [begin, end), which may be none. */
export interface Segment {
	readonly begin: number;
	readonly end: number;
	/** Whether ids are embedded before them: in the first segment. */
	readonly embeds: boolean;
	/** Whether the final norm and the output layer come after them: in the last segment. */
	readonly hasHead: boolean;
}

export function wholeModel(layers: number): Segment {
	return { begin: 0, end: layers, embeds: true, hasHead: true };
}

/** Segments of so many layers each, in order. */
export function segmentsOf(lengths: readonly number[]): Segment[] {
	let begin = 0;
	return lengths.map((length, index) => {
		begin += length;
		return { begin: begin - length, end: begin, embeds: index === 0, hasHead: index === lengths.length - 1 };
	});
}

/** Those of stage `stage` of `stages`: every `stages`-th. */
export function segmentsOfStage(segments: readonly Segment[], stage: number, stages: number): Segment[] {
	return segments.filter((_, index) => index % stages === stage);
}
