/** Measures the parts of a step on one rank. */
import type { StepSeconds } from "./step-report.ts";

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
