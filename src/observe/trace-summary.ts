/** Where the steps of a trace went: parts, operations, layers and collectives, by module and summed over its ranks. */
import { readFileSync } from "node:fs";
import { UserError } from "../native/errors.ts";
import type { TraceEvent } from "./trace.ts";

/** Calls of one kind. */
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
	/** Of the steps' parts, means of the ranks. */
	readonly parts: readonly Total[];
	/** Longest first, means of the ranks. */
	readonly operations: readonly Total[];
	readonly scopes: readonly Total[];
	readonly collectives: readonly Total[];
	/** Milliseconds of the passes in which neither an operation nor a collective ran: the host's own work. */
	readonly host: number;
	/** null: a CPU library, whose operations are the host's own work. */
	readonly gpu: GpuTime | null;
	readonly peakBytes: number;
}

/** A GPU's milliseconds from its first operation to its last, mean of the ranks. */
export interface GpuTime {
	readonly busy: number;
	/** In gaps shorter than `launchGapMicroseconds`: the next operation had not been queued. */
	readonly launchGaps: number;
	/** In longer gaps: it waited for other ranks, for data or for the host. */
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

	/** A rank's share. */
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

export function readTrace(file: string): TraceEvent[] {
	let text: string;
	try {
		text = readFileSync(file, "utf8");
	} catch (error) {
		throw new UserError(`${file} cannot be read: ${(error as NodeJS.ErrnoException).code}.`);
	}
	try {
		const { traceEvents } = JSON.parse(text) as { traceEvents: TraceEvent[] };
		if (Array.isArray(traceEvents) && traceEvents.some(({ ph }) => ph === "X")) return traceEvents;
	} catch {
		// Said below.
	}
	throw new UserError(`${file} is no trace of mimo train (profile-step-start).`);
}

export function summariseTrace(events: readonly TraceEvent[]): TraceSummary {
	const modules = new Map<number, string>();
	for (const { name, pid, args } of events) {
		if (name === "process_name") modules.set(pid, /: (\w+)/.exec(String(args?.name))?.[1] ?? "rank");
	}
	const spans = events.filter(({ ph }) => ph === "X");
	const steps = new Set(spans.flatMap(({ cat, args }) => (cat === "step" ? [args!.step] : []))).size;
	const begin = Math.min(...chunked(spans, ({ ts }) => ts!, Math.min));
	const end = Math.max(...chunked(spans, ({ ts, dur }) => ts! + dur!, Math.max));
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

/** Extremes of many values, without as many arguments. */
function chunked(
	spans: readonly TraceEvent[],
	of: (event: TraceEvent) => number,
	extreme: (...all: number[]) => number,
) {
	const size = 10_000;
	return Array.from({ length: Math.ceil(spans.length / size) }, (_, i) =>
		extreme(...spans.slice(i * size, (i + 1) * size).map(of)),
	);
}

function summariseModule(name: string, ranks: number, events: readonly TraceEvent[]): ModuleSummary {
	const [parts, operations, scopes, collectives] = [new Totals(), new Totals(), new Totals(), new Totals()];
	let busy = 0;
	let peakBytes = 0;
	const passes = events.filter(({ cat, name: part }) => cat === "step" && part === "compute");
	const inPasses = (at: number, rank: number) =>
		passes.some(({ pid, ts, dur }) => pid === rank && ts! <= at && at < ts! + dur!);
	for (const { ph, cat, name: what, dur, ts, pid, args } of events) {
		if (ph === "C") peakBytes = Math.max(peakBytes, Number(args?.allocated ?? 0));
		if (ph !== "X") continue;
		const milliseconds = dur! / 1000;
		if (cat === "step") parts.add(what, milliseconds);
		if (cat === "operations") {
			operations.add(what, milliseconds);
			scopes.add(String(args?.scope ?? ""), milliseconds);
		}
		if (cat === "collectives") collectives.add(`${args?.group} ${what}`, milliseconds, Number(args?.bytes ?? 0));
		if ((cat === "operations" || cat === "collectives") && inPasses(ts!, pid)) busy += milliseconds;
	}
	const whole = passes.reduce((sum, { dur }) => sum + dur! / 1000, 0);
	return {
		name,
		ranks,
		parts: parts.means(ranks),
		operations: operations.means(ranks),
		scopes: scopes.means(ranks),
		collectives: collectives.means(ranks),
		host: Math.max(0, whole - busy) / ranks,
		gpu: gpuTime(events, ranks),
		peakBytes,
	};
}

/** Only GPUs are told of operations before they do them. */
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
		// Operations of several streams may run side by side.
		sums.busy += Math.max(0, end - Math.max(begin, reached));
		last.set(pid, Math.max(reached, end));
	}
	const mean = (microseconds: number) => microseconds / 1000 / ranks;
	return { busy: mean(sums.busy), launchGaps: mean(sums.launchGaps), waits: mean(sums.waits) };
}
