/**
 * What one rank did in some steps, for Chrome's and Perfetto's trace viewers: parts of the step, operations by layer,
 * collectives with group and sequence number, device memory. Each rank writes its own part of the file; one merges them.
 */
import { appendFileSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import type { Device, DeviceEvent, DeviceTracer, Stream } from "../native/device.ts";
import { UserError } from "../native/errors.ts";

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
const rowNames = ["step", "operations", "collectives", "queueing"];

/** An operation of a GPU, whose times are known once it has worked. */
interface Pending {
	readonly name: string;
	readonly scope: string;
	readonly began: DeviceEvent;
	readonly ended: DeviceEvent;
}

export class Tracer implements DeviceTracer {
	readonly #events: TraceEvent[] = [];
	#scope = "";
	#step = 0;
	/** Of the operation that is being queued: milliseconds of performance.now(). */
	#began = 0;
	/** null: the library works while it is called, so the host's clock is enough. */
	readonly #gpu: { readonly start: DeviceEvent; readonly startedAt: number; pending: Pending[] } | null;
	#before: DeviceEvent | null = null;

	constructor(
		private readonly device: Device,
		private readonly rank: number,
		/** What the viewer calls the rank, such as "rank 2: language, tp 0 dp 0". */
		title: string,
		/** Microseconds to add to this host's clock for that of rank 0. */
		private readonly offset: number,
	) {
		const name = (what: string, tid: number, text: string): TraceEvent => ({
			name: what,
			ph: "M",
			pid: rank,
			tid,
			args: { name: text },
		});
		this.#events.push(name("process_name", 0, title));
		for (const [tid, text] of rowNames.entries()) this.#events.push(name("thread_name", tid, text));
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
		const scope = this.#scope;
		this.#span(name, this.#gpu === null ? rows.operations : rows.queueing, this.#began, { scope });
		if (this.#gpu === null) return;
		const ended = this.device.createEvent();
		ended.record(stream);
		this.#gpu.pending.push({ name, scope, began: this.#before!, ended });
	}

	scope(name: string): void {
		this.#scope = name;
		this.memory();
	}

	collective({ group, kind, sequence, bytes, began }: Parameters<DeviceTracer["collective"]>[0]): void {
		this.#span(kind, rows.collectives, began, { group, sequence, bytes, scope: this.#scope });
	}

	/** A part of the step, such as "bridge", that began at `began` and is over. */
	part(name: string, began: number): void {
		this.#span(name, rows.step, began, { step: this.#step });
		this.memory();
	}

	memory(): void {
		const { liveBytes, reservedBytes } = this.device.memoryInUse();
		const args = { allocated: liveBytes, reserved: reservedBytes };
		const ts = this.#time(performance.now());
		this.#events.push({ name: "memory", ph: "C", pid: this.rank, tid: 0, ts, args });
	}

	/** Writes this rank's events, one a line. */
	write(file: string): void {
		this.#timeGpuOperations();
		writeFileSync(file, this.#events.map((event) => `${JSON.stringify(event)}\n`).join(""));
	}

	#timeGpuOperations(): void {
		if (this.#gpu === null) return;
		this.device.synchronize();
		const { start, startedAt, pending } = this.#gpu;
		for (const { name, scope, began, ended } of pending) {
			const ts = this.#time(startedAt + began.millisecondsSince(start));
			const dur = ended.millisecondsSince(began) * 1000;
			const tid = rows.operations;
			this.#events.push({ name, ph: "X", pid: this.rank, tid, ts, dur, cat: rowNames[tid]!, args: { scope } });
			began[Symbol.dispose]();
			ended[Symbol.dispose]();
		}
		start[Symbol.dispose]();
	}

	#span(name: string, tid: number, began: number, args: NonNullable<TraceEvent["args"]>): void {
		const dur = (performance.now() - began) * 1000;
		this.#events.push({ name, ph: "X", pid: this.rank, tid, ts: this.#time(began), dur, cat: rowNames[tid]!, args });
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
