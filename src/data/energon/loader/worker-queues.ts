/** The loader's queues of a data rank: waiting outputs of each logical worker, and the order of their turns. */
import type { Keyed } from "../sample.ts";
import { Turns } from "./round-robin.ts";

/** An output, or null at the end of a pass. */
export interface Event {
	readonly item: Keyed | null;
	readonly bytes: number;
}

/** The queue of a logical worker. */
export class WorkerQueue {
	/** Events that wait for the consumer. */
	readonly events: Event[] = [];
	/** Requested events that have not arrived. */
	asked = 0;
	/** Number of events that the consumer has taken. */
	taken = 0;

	constructor(
		/** Number among all workers of the loader. */
		readonly number: number,
		readonly thread: Worker,
	) {}

	/** Number of events that wait or are requested. */
	get has(): number {
		return this.events.length + this.asked;
	}
}

export class Lane {
	readonly workers: WorkerQueue[] = [];
	readonly turns: Turns;

	constructor(
		/** The data rank. */
		readonly rank: number,
		workers: number,
		start: { readonly nextWorker: number; readonly ended: readonly boolean[] } | null,
	) {
		this.turns = new Turns(workers, start?.nextWorker, start?.ended);
	}

	/** Workers in the order of their turns, from the current worker on. */
	following(): WorkerQueue[] {
		return [...this.turns.following()].map((id) => this.workers[id]!);
	}
}
