/** Divides a step's time into parts, on one rank. */
import type { StepSeconds } from "./step-report.ts";

export type StepPart = keyof StepSeconds;

const nothing: StepSeconds = { compute: 0, bridge: 0, wait: 0, gradients: 0, optimizer: 0, data: 0, other: 0 };

/**
 * Times at which a device has done the work queued before them. Recording one does not wait: a host that waited at every part would
 * queue the next one's work late.
 */
export interface Timestamps {
	record(): void;
	/** All timestamps recorded since the last call, in milliseconds of performance.now(), ascending; waits for the last. */
	take(): number[];
}

/** A device that has done its work when a call returns. */
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
	/** The step's parts in order; each began at the timestamp of its number. */
	#parts: StepPart[] = [];
	#watcher: ((part: StepPart, began: number, ended: number) => void) | null = null;

	constructor(private readonly timestamps: Timestamps) {}

	/** A step begins, with `part`. */
	start(part: StepPart): void {
		this.#parts = [];
		this.enter(part);
	}

	/** Work queued from now on belongs to `part`, and so does the time that it takes. */
	enter(part: StepPart): void {
		this.timestamps.record();
		this.#parts.push(part);
	}

	/** Calls `watcher` with every part of a step when the step is over; null: no watcher. */
	watch(watcher: ((part: StepPart, began: number, ended: number) => void) | null): void {
		this.#watcher = watcher;
	}

	/** The step is over; waits until the device has done all of it. */
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
