/**
 * Megatron's timers (docs/spec/runtime.md §12.3): names, levels, measurement on a rank, and the display over all ranks. Timers
 * above the configured level are not measured.
 */
import type { StepSeconds, TimersReport } from "./step-report.ts";

/** Timers in display order. Level 1: a few for each step; level 2: a few for each microbatch. */
const levels = {
	"forward-backward": 1,
	"forward-compute": 2,
	"backward-compute": 2,
	"batch-generator": 2,
	"forward-recv": 2,
	"forward-send": 2,
	"backward-recv": 2,
	"backward-send": 2,
	"all-grads-sync": 1,
	"params-all-gather": 1,
	"optimizer-clip-main-grad": 1,
	"optimizer-count-zeros": 1,
	"optimizer-inner-step": 1,
	optimizer: 1,
} as const;

export type TimerName = keyof typeof levels;

export const timerNames = Object.keys(levels) as TimerName[];

/** The interface of timers for the parts of a step. */
export interface StepTimers {
	start(name: TimerName): void;
	stop(name: TimerName): void;
}

/** Runs `body` under a timer; without timers it only runs `body`. */
export function timed<Result>(timers: StepTimers | undefined, name: TimerName, body: () => Result): Result {
	timers?.start(name);
	const result = body();
	timers?.stop(name);
	return result;
}

/** The timers of one rank. */
export class Timers implements StepTimers {
	readonly #began = new Map<TimerName, number>();
	readonly #seconds = new Map<TimerName, number>();

	/** `settle`: waits for all queued work of the device. */
	constructor(
		private readonly level: number,
		private readonly settle: () => void,
		private readonly now: () => number = () => performance.now(),
	) {}

	start(name: TimerName): void {
		if (levels[name] > this.level) return;
		this.settle();
		this.#began.set(name, this.now());
	}

	stop(name: TimerName): void {
		if (levels[name] > this.level) return;
		this.settle();
		const seconds = (this.now() - this.#began.get(name)!) / 1000;
		this.#seconds.set(name, (this.#seconds.get(name) ?? 0) + seconds);
	}

	/** Seconds of a timer since the last reset; 0 if it was not used. */
	seconds(name: TimerName): number {
		return this.#seconds.get(name) ?? 0;
	}

	reset(): void {
		this.#seconds.clear();
	}
}

/** Megatron's text of the timers; null without measurements. */
export function formatTimers({ option, seconds }: TimersReport): string | null {
	const milliseconds = (value: number) => fixed(value * 1000, 2);
	const lines: string[] = [];
	for (const [name, ranks] of seconds) {
		const measured = ranks.filter((value) => value > 0);
		if (measured.length === 0) continue;
		if (option === "all") {
			lines.push(`  ${name}:`);
			for (const [rank, value] of ranks.entries()) {
				if (value > 0) lines.push(`     rank ${String(rank).padStart(2)}: ${milliseconds(value)}`);
			}
			continue;
		}
		const [least, most] = [milliseconds(Math.min(...measured)), milliseconds(Math.max(...measured))];
		lines.push(`    ${`${name} `.padEnd(48, ".")}: ${option === "max" ? most : `(${least}, ${most})`}`);
	}
	const title = { minmax: "(min, max) time across ranks (ms):", max: "max time across ranks (ms):" };
	const first = option === "all" ? "times across ranks (ms):" : title[option];
	return lines.length === 0 ? null : [first, ...lines].join("\n");
}

// Measures the parts of a step on one rank.

export type StepPart = keyof StepSeconds;

const nothing: StepSeconds = { compute: 0, bridge: 0, wait: 0, gradients: 0, optimizer: 0, data: 0, other: 0 };

/**
 * Timestamps in a device's queue. Recording does not wait for the device, so that the host queues the next part's work early.
 */
export interface Timestamps {
	record(): void;
	/** Waits for the last timestamp; returns all timestamps since the last call in ascending milliseconds of performance.now(). */
	take(): number[];
}

/** Timestamps of a synchronous device, such as the CPU library. */
export function hostTimestamps(now: () => number = () => performance.now()): Timestamps {
	let recorded: number[] = [];
	return {
		record: () => void recorded.push(now()),
		take: () => {
			const taken = recorded;
			recorded = [];
			return taken;
		},
	};
}

export class StepClock {
	/** The step's parts in order; part i begins at timestamp i. */
	#parts: StepPart[] = [];
	#watcher: ((part: StepPart, began: number, ended: number) => void) | null = null;

	constructor(private readonly timestamps: Timestamps) {}

	/** Starts a step with `part`. */
	start(part: StepPart): void {
		this.#parts = [];
		this.enter(part);
	}

	/** Starts another part, to which the time of later work belongs. */
	enter(part: StepPart): void {
		this.timestamps.record();
		this.#parts.push(part);
	}

	/** Calls `watcher` with every part of a step when the step is over; null: no watcher. */
	watch(watcher: ((part: StepPart, began: number, ended: number) => void) | null): void {
		this.#watcher = watcher;
	}

	/** Ends the step; waits until the device has done all of its work. */
	stop(): StepSeconds {
		this.timestamps.record();
		const timestamps = this.timestamps.take();
		const seconds: Record<StepPart, number> = { ...nothing };
		for (const [index, part] of this.#parts.entries()) {
			const [began, ended] = [timestamps[index]!, timestamps[index + 1]!];
			seconds[part] += (ended - began) / 1000;
			this.#watcher?.(part, began, ended);
		}
		return seconds;
	}
}

// Formats numbers as C's printf and Python's format do, so that log lines equal Megatron's to the last digit.

/** Digits after the point of exact decimal expansions, sufficient for logged values. */
const exactDigits = 100;

function special(value: number): string | null {
	if (Number.isNaN(value)) return "nan";
	return Number.isFinite(value) ? null : value < 0 ? "-inf" : "inf";
}

/** printf("%.<digits>f"). */
export function fixed(value: number, digits: number): string {
	const name = special(value);
	if (name !== null) return name;
	if (Math.abs(value) >= 1e21) return BigInt(value).toString() + (digits > 0 ? `.${"0".repeat(digits)}` : "");
	const sign = value < 0 || Object.is(value, -0) ? "-" : "";
	const size = Math.abs(value);
	const exact = size.toFixed(exactDigits);
	const point = exact.indexOf(".");
	const kept = digits === 0 ? point : point + 1 + digits;
	const rounded = size.toFixed(digits);
	// JavaScript rounds exact ties up, C to the even digit.
	const tail = exact.slice(point + 1 + digits);
	if (!/^50*$/.test(tail)) return sign + rounded;
	const before = exact.slice(0, kept);
	return sign + (Number(before.at(-1)) % 2 === 0 ? before : rounded);
}

/** printf("%.<digits>E"), with an exponent of at least two digits. */
export function scientific(value: number, digits: number): string {
	const name = special(value);
	if (name !== null) return name.toUpperCase();
	const sign = value < 0 || Object.is(value, -0) ? "-" : "";
	const size = Math.abs(value);
	const split = (text: string) => text.split("e") as [string, string];
	const [exact] = split(size.toExponential(exactDigits));
	let [mantissa, exponent] = split(size.toExponential(digits));
	const kept = digits === 0 ? 1 : digits + 2;
	if (/^\.?50*$/.test(exact.slice(kept)) && Number(exact[kept - 1]) % 2 === 0) {
		mantissa = exact.slice(0, kept);
		exponent = split(size.toExponential(exactDigits))[1];
	}
	const power = Number(exponent);
	return `${sign}${mantissa}E${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

/** Python's str() of a float, with ".0" after whole numbers. */
export function pythonFloat(value: number): string {
	const name = special(value);
	if (name !== null) return name;
	if (Number.isInteger(value) && Math.abs(value) < 1e16) return `${Object.is(value, -0) ? "-0" : value}.0`;
	const text = String(value);
	const size = Math.abs(value);
	if (size >= 1e16 || size < 1e-4) {
		const [mantissa, exponent] = value.toExponential().split("e") as [string, string];
		const power = Number(exponent);
		return `${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
	}
	return text;
}
