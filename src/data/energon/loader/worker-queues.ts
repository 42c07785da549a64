/** The loader's queues of one data rank: its logical workers, whose turn it is, and the outputs that wait for the consumer. */
import type { Keyed } from "../sample.ts";
import { Turns } from "./round-robin.ts";

/** An output, or null at the end of a pass. */
export interface Event {
	readonly item: Keyed | null;
	readonly bytes: number;
}

/** The loader's side of a logical worker. */
export class WorkerQueue {
	/** Events that wait for the consumer. */
	readonly events: Event[] = [];
	/** Events asked for that have not arrived. */
	asked = 0;
	/** Events the consumer has taken. */
	taken = 0;

	constructor(
		/** Its number among all workers of the loader. */
		readonly number: number,
		readonly thread: Worker,
	) {}

	/** Events that wait or will arrive. */
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

	/** Workers in the order they will be asked, the one whose turn it is first. */
	following(): WorkerQueue[] {
		return [...this.turns.following()].map((id) => this.workers[id]!);
	}
}
