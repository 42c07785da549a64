/**
 * Arranges spans in lanes so that trace viewers accept all of them. Perfetto's trace processor (slice_tracker.cc, json_trace_parser.cc)
 * keeps a span on its thread only if it lies within the one that is open or begins when that has ended, compares in
 * nanoseconds, and takes a thread 0 of a process other than 0 for the thread with the process's number.
 */

/** Microseconds. */
export interface Span {
	readonly begin: number;
	readonly end: number;
}

/**
 * Rounds to an eighth of a microsecond, which is a whole number of nanoseconds and exact as a double, so that readers that round
 * and readers that truncate see the same ends.
 */
export const exactTime = (microseconds: number): number => Math.round(microseconds * 8) / 8;

/**
 * Lanes of spans, from 0, in the order of the spans; spans of a lane do not overlap. `slack`: possible error of the clock in
 * microseconds; a shorter overlap is removed by ending the earlier span at the begin of the later span.
 */
export function lanesOf<One extends Span>(
	spans: readonly One[],
	slack = 0,
): { readonly span: One; readonly lane: number; readonly end: number }[] {
	const order = spans.map((_, i) => i).sort((a, b) => spans[a]!.begin - spans[b]!.begin || a - b);
	const placed: { span: One; lane: number; end: number }[] = new Array(spans.length);
	const last: number[] = [];
	for (const i of order) {
		const span = spans[i]!;
		const free = last.findIndex((one) => placed[one]!.end <= span.begin + slack);
		const lane = free < 0 ? last.length : free;
		const before = free < 0 ? undefined : placed[last[lane]!]!;
		if (before !== undefined) before.end = Math.max(before.span.begin, Math.min(before.end, span.begin));
		placed[i] = { span, lane, end: span.end };
		last[lane] = i;
	}
	return placed;
}
