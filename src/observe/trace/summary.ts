/** Summarises a trace: time by step part, operation, layer and collective, by module and summed over its ranks. */
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import type { TraceEvent } from "./tracer.ts";

/** Bytes of the largest trace that is read: a string has no more characters. */
const LARGEST_TRACE = 2 ** 29;

/** Total of the calls of one kind. */
export interface Total {
	readonly name: string;
	calls: number;
	milliseconds: number;
	bytes: number;
}

export interface ModuleSummary {
	/** "language" or "radio_encoder". */
	readonly name: string;
	readonly ranks: number;
	/** Times of the parts of steps, means over ranks. */
	readonly parts: readonly Total[];
	/** Longest first, means over ranks. */
	readonly operations: readonly Total[];
	readonly scopes: readonly Total[];
	readonly collectives: readonly Total[];
	/** Times in which a GPU only waited for a collective, by group and kind; empty for the CPU library. */
	readonly waits: readonly Total[];
	/** Milliseconds of the passes without an operation or a collective, the work of the host. */
	readonly host: number;
	/** null: the CPU library, whose operations run on the host. */
	readonly gpu: GpuTime | null;
	readonly peakBytes: number;
}

/** A GPU's milliseconds from its first operation to its last, mean of the ranks. */
export interface GpuTime {
	readonly busy: number;
	/** Gaps shorter than `launchGapMicroseconds`, in which the next operation was not queued yet. */
	readonly launchGaps: number;
	/** Longer gaps, in which the GPU waited for other ranks, for data or for the host. */
	readonly waits: number;
}

const launchGapMicroseconds = 100;

export interface TraceSummary {
	readonly steps: number;
	readonly ranks: number;
	readonly milliseconds: number;
	readonly modules: readonly ModuleSummary[];
}

class Totals {
	readonly #byName = new Map<string, Total>();

	add(name: string, milliseconds: number, bytes = 0): void {
		const total = this.#byName.get(name) ?? { name, calls: 0, milliseconds: 0, bytes: 0 };
		this.#byName.set(name, total);
		total.calls++;
		total.milliseconds += milliseconds;
		total.bytes += bytes;
	}

	/** Means over ranks. */
	means(ranks: number): Total[] {
		return [...this.#byName.values()]
			.map(({ name, calls, milliseconds, bytes }) => ({
				name,
				calls: calls / ranks,
				milliseconds: milliseconds / ranks,
				bytes: bytes / ranks,
			}))
			.sort((a, b) => b.milliseconds - a.milliseconds);
	}
}

/** Length of the union of spans in the order of their begins; several sends may run at once. */
class Cover {
	readonly #reached = new Map<string, number>();

	/** Length of the part of a span that earlier spans of the key do not cover. */
	add(key: string, begin: number, duration: number): number {
		const reached = this.#reached.get(key) ?? Number.NEGATIVE_INFINITY;
		const end = begin + duration;
		this.#reached.set(key, Math.max(reached, end));
		return Math.max(0, end - Math.max(begin, reached));
	}
}

/** A span has a time and a duration in microseconds; a name's or a counter's arguments are text or numbers. */
const argument = v.union([v.string(), v.number(), v.boolean(), v.null()]);
const eventShape = {
	name: v.string(),
	pid: v.number(),
	cat: v.optional(v.string()),
	args: v.optional(v.record(v.string(), argument)),
};
const traceSchema = v.object({
	traceEvents: v.array(
		v.union([
			v.looseObject({ ...eventShape, ph: v.literal("X"), ts: v.number(), dur: v.number() }),
			v.looseObject({ ...eventShape, ph: v.pipe(v.string(), v.notValue("X")) }),
		]),
	),
});

/** The events of a trace file. Throws a UserError that names the file and the first malformed event. */
export function readTrace(file: string): TraceEvent[] {
	const text = readWholeText(file, LARGEST_TRACE);
	let json: unknown;
	try {
		json = JSON.parse(text);
	} catch {
		throw new UserError(`${file} is not a trace of mimo train (profile-step-start): it is not JSON.`);
	}
	const parsed = v.safeParse(traceSchema, json);
	if (!parsed.success) {
		const place = v.getDotPath(parsed.issues[0])?.slice(0, 80) ?? "its top level";
		throw new UserError(`${file} is not a trace of mimo train (profile-step-start): ${place} is malformed.`);
	}
	const events = parsed.output.traceEvents as unknown as TraceEvent[];
	if (events.some(({ ph }) => ph === "X")) return events;
	throw new UserError(`${file} is not a trace of mimo train (profile-step-start): it has no spans.`);
}

export function summariseTrace(events: readonly TraceEvent[]): TraceSummary {
	const modules = new Map<number, string>();
	for (const { name, pid, args } of events) {
		if (name === "process_name") modules.set(pid, /: (\w+)/.exec(String(args?.name))?.[1] ?? "rank");
	}
	const spans = events.filter(({ ph }) => ph === "X");
	const steps = new Set(spans.flatMap(({ cat, args }) => (cat === "step" ? [args?.step] : []))).size;
	const begin = spans.reduce((least, { ts }) => Math.min(least, ts!), Number.POSITIVE_INFINITY);
	const end = spans.reduce((most, { ts, dur }) => Math.max(most, ts! + dur!), Number.NEGATIVE_INFINITY);
	const names = [...new Set(modules.values())];
	return {
		steps,
		ranks: modules.size,
		milliseconds: (end - begin) / 1000,
		modules: names.map((name) => {
			const ranks = [...modules].filter(([, module]) => module === name).map(([rank]) => rank);
			return summariseModule(
				name,
				ranks.length,
				events.filter(({ pid }) => modules.get(pid) === name),
			);
		}),
	};
}

function summariseModule(name: string, ranks: number, events: readonly TraceEvent[]): ModuleSummary {
	const [parts, operations, scopes, collectives] = [new Totals(), new Totals(), new Totals(), new Totals()];
	const waits = new Totals();
	let busy = 0;
	let peakBytes = 0;
	const passes = events.filter(({ cat, name: part }) => cat === "step" && part === "compute");
	const inPasses = (at: number, rank: number) =>
		passes.some(({ pid, ts, dur }) => pid === rank && ts! <= at && at < ts! + dur!);
	const [ofCollective, ofRank] = [new Cover(), new Cover()];
	const inOrder = events.toSorted((a, b) => (a.ts ?? 0) - (b.ts ?? 0));
	for (const { ph, cat, name: what, dur, ts, pid, args } of inOrder) {
		if (ph === "C") peakBytes = Math.max(peakBytes, Number(args?.allocated ?? 0));
		if (ph !== "X") continue;
		const milliseconds = dur! / 1000;
		if (cat === "step") parts.add(what, milliseconds);
		if (cat === "waits") waits.add(what, milliseconds);
		if (cat === "operations") {
			operations.add(what, milliseconds);
			scopes.add(String(args?.scope ?? ""), milliseconds);
		}
		if (cat === "collectives") {
			const name = `${args?.group} ${what}`;
			const alone = ofCollective.add(`${pid} ${name}`, ts!, dur!) / 1000;
			collectives.add(name, alone, Number(args?.bytes ?? 0));
		}
		if ((cat === "operations" || cat === "collectives") && inPasses(ts!, pid)) {
			busy += ofRank.add(String(pid), ts!, dur!) / 1000;
		}
	}
	const whole = passes.reduce((sum, { dur }) => sum + dur! / 1000, 0);
	return {
		name,
		ranks,
		parts: parts.means(ranks),
		operations: operations.means(ranks),
		scopes: scopes.means(ranks),
		collectives: collectives.means(ranks),
		waits: waits.means(ranks),
		host: Math.max(0, whole - busy) / ranks,
		gpu: gpuTime(events, ranks),
		peakBytes,
	};
}

/** GPU times; null for the CPU library, whose operations are not queued. */
function gpuTime(events: readonly TraceEvent[], ranks: number): GpuTime | null {
	if (!events.some(({ cat }) => cat === "queueing")) return null;
	const sums = { busy: 0, launchGaps: 0, waits: 0 };
	const last = new Map<number, number>();
	const operations = events.filter(({ cat }) => cat === "operations").sort((a, b) => a.ts! - b.ts!);
	for (const { pid, ts, dur } of operations) {
		const [begin, end] = [ts!, ts! + dur!];
		const reached = last.get(pid) ?? begin;
		const gap = Math.max(0, begin - reached);
		sums[gap < launchGapMicroseconds ? "launchGaps" : "waits"] += gap;
		// Operations of several streams may overlap.
		sums.busy += Math.max(0, end - Math.max(begin, reached));
		last.set(pid, Math.max(reached, end));
	}
	const mean = (microseconds: number) => microseconds / 1000 / ranks;
	return { busy: mean(sums.busy), launchGaps: mean(sums.launchGaps), waits: mean(sums.waits) };
}
