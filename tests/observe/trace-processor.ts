/**
 * The way in which Perfetto's trace processor reads complete events of a JSON trace, from its sources at ec5d16b14b
 * (src/trace_processor/importers): numbers of threads and times as json_trace_tokenizer.cc reads them, nesting as
 * SliceTracker::MaybeCloseStack in slice_tracker.cc decides it. Its binary is not part of any package that tests could take.
 */

interface Event {
	readonly name: string;
	readonly ph: string;
	readonly pid: number;
	readonly tid: number;
	readonly ts?: number;
	readonly dur?: number;
}

interface Slice {
	readonly name: string;
	readonly begin: number;
	readonly dur: number;
}

/** CoerceToTs: microseconds to nanoseconds. Releases until 2025 cut off what today's round. */
const readers: Readonly<Record<string, (microseconds: number) => number>> = {
	rounds: (value) => (Number.isInteger(value) ? value * 1000 : Math.round(value * 1000)),
	"cuts off": (value) => Math.trunc(value * 1000),
};

/** kMaxDepth. */
const deepest = 512;

/**
 * A sentence for each event that a trace processor drops or moves to a track of its own, or that it would read onto another
 * thread than is written. `flat`: nested spans are a mistake too.
 */
export function complaintsOf(events: readonly Event[], { flat = false } = {}): string[] {
	const complaints = new Set<string>();
	for (const [reader, nanoseconds] of Object.entries(readers)) {
		const stacks = new Map<string, Slice[]>();
		// The sorter is stable: events of one moment stay in the order of the file.
		const timed = events.filter(({ ph }) => ph !== "M").toSorted((a, b) => nanoseconds(a.ts!) - nanoseconds(b.ts!));
		for (const { name, ph, pid, tid, ts, dur } of timed) {
			const say = (what: string) => complaints.add(`${name} (${pid}.${tid}, ${ts}): ${what}`);
			if (!(ts! >= 0)) say("begins before 0");
			if (ph !== "X") continue;
			if (!(dur! >= 0)) say("has no length");
			// "Make the tid equal to the pid if tid is not set."
			if (tid === 0 && pid !== 0) say(`counts as of thread ${pid}`);
			const begin = nanoseconds(ts!);
			const slice = { name, begin, dur: nanoseconds(dur!) };
			const key = `${pid}.${tid === 0 ? pid : tid}`;
			const stack = stacks.get(key) ?? [];
			stacks.set(key, stack);
			let overlaps: Slice | null = null;
			for (let i = stack.length - 1; i >= 0 && overlaps === null; i--) {
				const open = stack[i]!;
				const end = open.begin + open.dur;
				if (end < begin || (end === begin && !(open.dur === 0 && slice.dur === 0))) stack.splice(i, 1);
				else if (begin < end && begin + slice.dur > end) overlaps = open;
			}
			if (overlaps !== null) say(`overlaps ${overlaps.name} where a reader ${reader}`);
			else {
				if (stack.length >= deepest) say("is too deep");
				if (flat && stack.length > 0 && slice.dur > 0) say(`lies within ${stack.at(-1)!.name}`);
				stack.push(slice);
			}
		}
	}
	return [...complaints];
}
