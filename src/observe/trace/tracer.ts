/**
 * A trace of one rank over some steps, for Chrome's and Perfetto's trace viewers: parts of the step, operations by
 * layer, collectives with group and sequence number, device memory. Each rank writes a part; one rank merges
 * the parts.
 */
import { appendFileSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import type { Device, DeviceEvent, DeviceTracer, Stream } from "../../native/device.ts";
import { UserError } from "../../system/errors.ts";
import { systemReason } from "../../system/system-errors.ts";

// The events of a tracer during a step, as numbers in flat memory, with numbered names. An event costs a tenth of a
// microsecond and allocates no objects; the trace is assembled after the steps.

interface LoggedEvent {
	readonly row: number;
	/** Numbers of texts. */
	readonly name: number;
	readonly scope: number;
	/** Milliseconds of performance.now(). */
	readonly began: number;
	readonly ended: number;
	/** Further numbers, whose meaning depends on the row. */
	readonly details: readonly [number, number, number];
}

/** Number of values of an event: row, name, began, ended, scope, details. */
const columns = 8;
const chunkEvents = 4096;

export class EventLog {
	readonly #chunks: Float64Array[] = [];
	#chunk = new Float64Array(0);
	/** Number of used values of `#chunk`. */
	#used = 0;
	readonly #numbers = new Map<string, number>();
	readonly #texts: string[] = [];

	/** The number of a text, by which events refer to it. */
	number(text: string): number {
		const known = this.#numbers.get(text);
		if (known !== undefined) return known;
		this.#numbers.set(text, this.#texts.length);
		return this.#texts.push(text) - 1;
	}

	text(number: number): string {
		return this.#texts[number]!;
	}

	add(row: number, name: number, began: number, ended: number, scope: number, a = 0, b = 0, c = 0): void {
		if (this.#used === this.#chunk.length) {
			this.#chunk = new Float64Array(chunkEvents * columns);
			this.#chunks.push(this.#chunk);
			this.#used = 0;
		}
		const chunk = this.#chunk;
		const at = this.#used;
		chunk[at] = row;
		chunk[at + 1] = name;
		chunk[at + 2] = began;
		chunk[at + 3] = ended;
		chunk[at + 4] = scope;
		chunk[at + 5] = a;
		chunk[at + 6] = b;
		chunk[at + 7] = c;
		this.#used = at + columns;
	}

	/** The events in the order of their addition. */
	events(): LoggedEvent[] {
		return this.#chunks.flatMap((chunk) => {
			const used = chunk === this.#chunk ? this.#used : chunk.length;
			return Array.from({ length: used / columns }, (_, i) => {
				const [row, name, began, ended, scope, a, b, c] = chunk.subarray(i * columns, (i + 1) * columns);
				return { row: row!, name: name!, began: began!, ended: ended!, scope: scope!, details: [a!, b!, c!] };
			});
		});
	}
}

/** A complete event ("X"), counter ("C") or name ("M") of the trace format; times in microseconds. */
export interface TraceEvent {
	readonly name: string;
	readonly ph: "X" | "C" | "M";
	/** Rank. */
	readonly pid: number;
	/** Row of the rank (see `rows`) and lane of the row. */
	readonly tid: number;
	readonly ts?: number;
	readonly dur?: number;
	readonly cat?: string;
	readonly args?: Readonly<Record<string, string | number>>;
}

/** Rows of a rank. On a GPU `operations` has the times of execution, `queueing` those of queueing. A thread may not be number 0. */
const rows = { step: 1, operations: 2, collectives: 3, queueing: 4, waits: 5 } as const;
/** Row number of device memory, a counter without spans. */
const memoryRow = -1;
const rowNames = ["", "step", "operations", "collectives", "queueing", "waits"];
/** Microseconds between two consecutive events of a GPU; a wait that is not longer is omitted. */
const noWait = 5;
/** Microseconds by which measured operations of a GPU may overlap. */
const gpuSlack = 2;

/** A span on a row of the trace. */
interface RowSpan extends Span {
	readonly name: string;
	readonly row: number;
	readonly args: NonNullable<TraceEvent["args"]>;
}

/** An operation of a GPU, or a wait of its stream for a collective, whose times are known after its execution. */
interface Pending {
	readonly row: typeof rows.operations | typeof rows.waits;
	readonly name: string;
	readonly scope: string;
	readonly began: DeviceEvent;
	readonly ended: DeviceEvent;
}

export class Tracer implements DeviceTracer {
	readonly #log = new EventLog();
	#scope: number;
	#step = 0;
	/** Begin of the operation that is being queued, in milliseconds of performance.now(). */
	#began = 0;
	/** null: the library is synchronous, so the host's clock measures it. */
	readonly #gpu: { readonly start: DeviceEvent; readonly startedAt: number; pending: Pending[] } | null;
	#before: DeviceEvent | null = null;
	/** The stream's event before a wait. */
	#waiting: { readonly stream: Stream; readonly began: DeviceEvent } | null = null;

	constructor(
		private readonly device: Device,
		private readonly rank: number,
		/** Name of the rank in the viewer, such as "rank 2: language, tp 0 dp 0". */
		private readonly title: string,
		/** Microseconds of the trace's clock, the same for all ranks, when this process's performance.now() was 0. */
		private readonly origin: number,
	) {
		this.#scope = this.#log.number("");
		this.#gpu = device.library.kind === "cpu" ? null : this.#startGpuClock();
	}

	/** Records an event and waits for it, which relates the GPU's clock to the host's. */
	#startGpuClock() {
		const start = this.device.createEvent();
		this.device.synchronize();
		start.record(this.device.stream);
		this.device.synchronize();
		return { start, startedAt: performance.now(), pending: [] };
	}

	/** Begins a step. */
	step(iteration: number): void {
		this.#step = iteration;
	}

	beforeOperation(stream: Stream): void {
		if (this.#gpu !== null) {
			this.#before = this.device.createEvent();
			this.#before.record(stream);
		}
		this.#began = performance.now();
	}

	operation(name: string, stream: Stream): void {
		const ended = performance.now();
		const gpu = this.#gpu;
		const row = gpu === null ? rows.operations : rows.queueing;
		this.#log.add(row, this.#log.number(name), this.#began, ended, this.#scope);
		if (gpu === null) return;
		const after = this.device.createEvent();
		after.record(stream);
		const scope = this.#log.text(this.#scope);
		gpu.pending.push({ row: rows.operations, name, scope, began: this.#before!, ended: after });
	}

	scope(name: string): void {
		this.#scope = this.#log.number(name);
		this.memory();
	}

	beforeWait(stream: Stream): void {
		if (this.#gpu === null) return;
		const began = this.device.createEvent();
		began.record(stream);
		this.#waiting = { stream, began };
	}

	collective({ group, kind, sequence, bytes, began }: Parameters<DeviceTracer["collective"]>[0]): void {
		this.#endWait(`${group} ${kind}`);
		const [name, members] = [this.#log.number(kind), this.#log.number(group)];
		this.#log.add(rows.collectives, name, began, performance.now(), this.#scope, members, sequence, bytes);
	}

	#endWait(name: string): void {
		if (this.#waiting === null) return;
		const { stream, began } = this.#waiting;
		this.#waiting = null;
		const ended = this.device.createEvent();
		ended.record(stream);
		this.#gpu!.pending.push({ row: rows.waits, name, scope: this.#log.text(this.#scope), began, ended });
	}

	/** Adds a part of the step, such as "bridge", between two times of performance.now(). */
	part(name: string, began: number, ended: number): void {
		this.#log.add(rows.step, this.#log.number(name), began, ended, this.#scope, this.#step);
		this.memory();
	}

	memory(): void {
		const { liveBytes, reservedBytes } = this.device.memoryInUse();
		const now = performance.now();
		this.#log.add(memoryRow, 0, now, now, 0, liveBytes, reservedBytes);
	}

	/** Writes this rank's events, one per line. Overlapping spans of a row are in different lanes. */
	write(file: string): void {
		const logged = this.#log.events();
		const spans = [...logged.flatMap((event) => this.#describe(event)), ...this.#gpuSpans()];
		const byRow = Map.groupBy(spans, ({ row }) => row);
		const events = [
			this.#name("process_name", 0, { name: this.title }),
			this.#name("process_sort_index", 0, { sort_index: this.rank }),
			...logged.flatMap((event) => this.#memoryEvent(event)),
			...[...byRow].flatMap(([row, own]) => this.#row(row, own)),
		];
		written(file, () => writeFileSync(file, events.map((event) => `${JSON.stringify(event)}\n`).join("")));
	}

	#name(name: string, tid: number, args: NonNullable<TraceEvent["args"]>): TraceEvent {
		return { name, ph: "M", pid: this.rank, tid, args };
	}

	#row(row: number, spans: readonly RowSpan[]): TraceEvent[] {
		const slack = (row === rows.operations || row === rows.waits) && this.#gpu !== null ? gpuSlack : 0;
		const placed = lanesOf(spans, slack);
		const lanes = placed.reduce((most, { lane }) => Math.max(most, lane + 1), 0);
		const thread = (lane: number) => row + lane * rowNames.length;
		const names = Array.from({ length: lanes }, (_, lane) => [
			this.#name("thread_name", thread(lane), { name: `${rowNames[row]}${lane === 0 ? "" : ` ${lane + 1}`}` }),
			this.#name("thread_sort_index", thread(lane), { sort_index: row * 1000 + lane }),
		]);
		const events = placed.map(
			({ span: { name, begin, args }, lane, end }): TraceEvent => ({
				...{ name, ph: "X", pid: this.rank, tid: thread(lane), ts: begin, dur: end - begin },
				...{ cat: rowNames[row]!, args },
			}),
		);
		return [...names.flat(), ...events];
	}

	#memoryEvent({ row, began, details: [allocated, reserved] }: LoggedEvent): TraceEvent[] {
		const event = { name: "memory", ph: "C", pid: this.rank, tid: rows.step, ts: this.#time(began) } as const;
		return row === memoryRow ? [{ ...event, args: { allocated, reserved } }] : [];
	}

	#describe({ row, name, began, ended, scope, details: [a, b, c] }: LoggedEvent): RowSpan[] {
		if (row === memoryRow) return [];
		const text = (number: number) => this.#log.text(number);
		let args: RowSpan["args"] = { scope: text(scope) };
		if (row === rows.step) args = { step: a };
		if (row === rows.collectives) args = { group: text(a), sequence: b, bytes: c, scope: text(scope) };
		return [{ name: text(name), row, begin: this.#time(began), end: this.#time(ended), args }];
	}

	#gpuSpans(): RowSpan[] {
		if (this.#gpu === null) return [];
		this.device.synchronize();
		const { start, startedAt, pending } = this.#gpu;
		const spans = pending.map(({ row, name, scope, began, ended }): RowSpan => {
			const at = startedAt + began.millisecondsSince(start);
			const [begin, end] = [this.#time(at), this.#time(at + ended.millisecondsSince(began))];
			began[Symbol.dispose]();
			ended[Symbol.dispose]();
			return { name, row, begin, end, args: { scope } };
		});
		start[Symbol.dispose]();
		return spans.filter(({ row, begin, end }) => row !== rows.waits || end - begin > noWait);
	}

	/** Microseconds of the trace's clock at a time of performance.now(). */
	#time(at: number): number {
		return exactTime(at * 1000 + this.origin);
	}
}

/** File of a rank's part before the merge. */
export function partName(file: string, rank: number): string {
	return `${file}.rank-${rank}`;
}

/** Merges the parts of all ranks into one file and removes them. */
export function mergeTrace(file: string, ranks: number): void {
	written(file, () => {
		writeFileSync(file, '{"traceEvents":[\n');
		for (let rank = 0; rank < ranks; rank++) {
			const lines = readFileSync(partName(file, rank), "utf8").trimEnd().replaceAll("\n", ",\n");
			appendFileSync(file, `${lines}${rank === ranks - 1 ? "\n" : ",\n"}`);
			rmSync(partName(file, rank));
		}
		appendFileSync(file, "]}\n");
	});
}

/** Removes the parts of a trace that could not be written. */
export function removeTrace(file: string, ranks: number): void {
	for (let rank = 0; rank < ranks; rank++) rmSync(partName(file, rank), { force: true });
	rmSync(file, { force: true });
}

/** Runs `write`; throws a UserError if the system refuses it. */
function written(file: string, write: () => void): void {
	try {
		write();
	} catch (error) {
		throw new UserError(`The trace ${file} cannot be written: ${systemReason(error)}.`);
	}
}

// Arranges spans in lanes so that trace viewers accept all of them. Perfetto's trace processor (slice_tracker.cc,
// json_trace_parser.cc) keeps a span on its thread only if it lies within the one that is open or begins when that
// has ended, compares in nanoseconds, and takes a thread 0 of a process other than 0 for the thread with the
// process's number.

/** Microseconds. */
interface Span {
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
