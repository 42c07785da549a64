/** Divides a step's wall clock into parts, on one rank. */
import type { StepSeconds } from "./report.ts";

export type StepPart = keyof StepSeconds;

const nothing: StepSeconds = { compute: 0, bridge: 0, wait: 0, gradients: 0, optimizer: 0, data: 0, other: 0 };

export class StepClock {
	#seconds: Record<StepPart, number> = { ...nothing };
	#part: StepPart = "other";
	#since = 0;
	#watcher: ((part: StepPart, began: number, ended: number) => void) | null = null;

	/**
	 * `settle`: returns when the device has done all queued work, so that its time counts for the part that queued it.
	 */
	constructor(
		private readonly settle: () => void,
		private readonly now: () => number = () => performance.now(),
	) {}

	/** A step begins, with `part`. */
	start(part: StepPart): void {
		this.#seconds = { ...nothing };
		this.#part = part;
		this.#since = this.now();
	}

	/** From now on time belongs to `part`. Returns the part it belonged to. */
	enter(part: StepPart): StepPart {
		this.settle();
		const now = this.now();
		const previous = this.#part;
		this.#seconds[previous] += (now - this.#since) / 1000;
		this.#watcher?.(previous, this.#since, now);
		this.#part = part;
		this.#since = now;
		return previous;
	}

	/** Calls `watcher` with every part that ends, when it began and when it ended; null: no watcher. */
	watch(watcher: ((part: StepPart, began: number, ended: number) => void) | null): void {
		this.#watcher = watcher;
	}

	/** The step is over. */
	stop(): StepSeconds {
		this.enter("other");
		return this.#seconds;
	}
}
