/**
 * A trace of one rank over some steps, for Chrome's and Perfetto's trace viewers: parts of the step, operations by
 * layer, collectives with group and sequence number, device memory. Each rank writes its own part; one rank merges
 * them.
 */
import { appendFileSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import type { Device, DeviceEvent, DeviceTracer, Stream } from "../native/device.ts";
import { UserError } from "../native/errors.ts";
import { EventLog, type LoggedEvent } from "./event-log.ts";

/** A complete event ("X"), counter ("C") or name ("M") of the trace format; times in microseconds. */
export interface TraceEvent {
	readonly name: string;
	readonly ph: "X" | "C" | "M";
	/** Rank. */
	readonly pid: number;
	/** Row of the rank: see `rows`. */
	readonly tid: number;
	readonly ts?: number;
	readonly dur?: number;
	readonly cat?: string;
	readonly args?: Readonly<Record<string, string | number>>;
}

/** On a GPU `operations` is when it worked, `queueing` when the host told it. */
const rows = { step: 0, operations: 1, collectives: 2, queueing: 3 } as const;
/** Device memory, which has no row of its own. */
const memoryRow = -1;
const rowNames = ["step", "operations", "collectives", "queueing"];

/** An operation of a GPU, whose times are known once it has worked. */
interface Pending {
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
	/** null: the library works while it is called, so the host's clock is enough. */
	readonly #gpu: { readonly start: DeviceEvent; readonly startedAt: number; pending: Pending[] } | null;
	#before: DeviceEvent | null = null;

	constructor(
		private readonly device: Device,
		private readonly rank: number,
		/** Name of the rank in the viewer, such as "rank 2: language, tp 0 dp 0". */
		private readonly title: string,
		/** Microseconds to add to this host's clock for that of rank 0. */
		private readonly offset: number,
	) {
		this.#scope = this.#log.number("");
		this.#gpu = device.library.kind === "cpu" ? null : this.#startGpuClock();
	}

	/** An event that passes while the host looks, by which both clocks are laid side by side. */
	#startGpuClock() {
		const start = this.device.createEvent();
		this.device.synchronize();
		start.record(this.device.stream);
		this.device.synchronize();
		return { start, startedAt: performance.now(), pending: [] };
	}

	/** A step begins. */
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
		gpu.pending.push({ name, scope: this.#log.text(this.#scope), began: this.#before!, ended: after });
	}

	scope(name: string): void {
		this.#scope = this.#log.number(name);
		this.memory();
	}

	collective({ group, kind, sequence, bytes, began }: Parameters<DeviceTracer["collective"]>[0]): void {
		const [name, members] = [this.#log.number(kind), this.#log.number(group)];
		this.#log.add(rows.collectives, name, began, performance.now(), this.#scope, members, sequence, bytes);
	}

	/** A part of the step, such as "bridge", that began at `began` and is over. */
	part(name: string, began: number): void {
		this.#log.add(rows.step, this.#log.number(name), began, performance.now(), this.#scope, this.#step);
		this.memory();
	}

	memory(): void {
		const { liveBytes, reservedBytes } = this.device.memoryInUse();
		const now = performance.now();
		this.#log.add(memoryRow, 0, now, now, 0, liveBytes, reservedBytes);
	}

	/** Writes this rank's events, one a line. */
	write(file: string): void {
		const events = [
			...this.#names(),
			...this.#log.events().map((event) => this.#describe(event)),
			...this.#gpuEvents(),
		];
		writeFileSync(file, events.map((event) => `${JSON.stringify(event)}\n`).join(""));
	}

	#names(): TraceEvent[] {
		const name = (what: string, tid: number, text: string): TraceEvent => ({
			name: what,
			ph: "M",
			pid: this.rank,
			tid,
			args: { name: text },
		});
		return [name("process_name", 0, this.title), ...rowNames.map((text, tid) => name("thread_name", tid, text))];
	}

	#describe({ row, name, began, ended, scope, details: [a, b, c] }: LoggedEvent): TraceEvent {
		const [pid, ts] = [this.rank, this.#time(began)];
		if (row === memoryRow) return { name: "memory", ph: "C", pid, tid: 0, ts, args: { allocated: a, reserved: b } };
		const text = (number: number) => this.#log.text(number);
		let args: TraceEvent["args"] = { scope: text(scope) };
		if (row === rows.step) args = { step: a };
		if (row === rows.collectives) args = { group: text(a), sequence: b, bytes: c, scope: text(scope) };
		return { name: text(name), ph: "X", pid, tid: row, ts, dur: (ended - began) * 1000, cat: rowNames[row]!, args };
	}

	#gpuEvents(): TraceEvent[] {
		if (this.#gpu === null) return [];
		this.device.synchronize();
		const { start, startedAt, pending } = this.#gpu;
		const events = pending.map(({ name, scope, began, ended }): TraceEvent => {
			const ts = this.#time(startedAt + began.millisecondsSince(start));
			const dur = ended.millisecondsSince(began) * 1000;
			const tid = rows.operations;
			began[Symbol.dispose]();
			ended[Symbol.dispose]();
			return { name, ph: "X", pid: this.rank, tid, ts, dur, cat: rowNames[tid]!, args: { scope } };
		});
		start[Symbol.dispose]();
		return events;
	}

	/** Microseconds since 1970 of a moment of performance.now(). */
	#time(at: number): number {
		return (performance.timeOrigin + at) * 1000 + this.offset;
	}
}

/** File of a rank's part while the trace is not merged. */
export function partName(file: string, rank: number): string {
	return `${file}.rank-${rank}`;
}

/** Puts the parts of all ranks into one file and removes them. */
export function mergeTrace(file: string, ranks: number): void {
	try {
		writeFileSync(file, '{"traceEvents":[\n');
		for (let rank = 0; rank < ranks; rank++) {
			const lines = readFileSync(partName(file, rank), "utf8").trimEnd().replaceAll("\n", ",\n");
			appendFileSync(file, `${lines}${rank === ranks - 1 ? "\n" : ",\n"}`);
			rmSync(partName(file, rank));
		}
		appendFileSync(file, "]}\n");
	} catch (error) {
		throw new UserError(`The trace ${file} cannot be written: ${(error as Error).message}.`);
	}
}
