/**
 * Megatron's timers (docs/spec/runtime.md §12.3): names, levels, measurement on a rank, and the display over all ranks. Timers
 * above the configured level are not measured.
 */
import { fixed } from "./printf.ts";
import type { TimersReport } from "./step-report.ts";

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
