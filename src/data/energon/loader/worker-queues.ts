/** The loader's queues of a data rank: waiting outputs of each logical worker, and the order of their turns. */
import type { Keyed } from "../sample.ts";

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

/**
 * Round-robin over workers in order of their numbers; a worker whose pass has ended waits for the end of all passes
 * (docs/spec/energon.md §2.3).
 */
export class Turns {
	#next: number;
	readonly #ended: boolean[];

	constructor(workers: number, next = 0, ended: readonly boolean[] = []) {
		this.#next = next;
		this.#ended = Array.from({ length: workers }, (_, i) => ended[i] ?? false);
	}

	/** The worker of the next output; null if all passes have ended, after which all workers start again. */
	worker(): number | null {
		if (this.#ended.every((ended) => ended)) {
			this.#ended.fill(false);
			this.#next = 0;
			return null;
		}
		while (this.#ended[this.#next]) this.#next = (this.#next + 1) % this.#ended.length;
		return this.#next;
	}

	/** Records an output of the current worker. */
	delivered(): void {
		this.#next = (this.#next + 1) % this.#ended.length;
	}

	/** Records the end of the current worker's pass. */
	endedPass(): void {
		this.#ended[this.#next] = true;
	}

	/** Whether each worker waits for the end of the others' passes. */
	get ended(): readonly boolean[] {
		return [...this.#ended];
	}

	get next(): number {
		return this.#next;
	}

	/** Workers in the order of their turns after `worker`, which is last. */
	*following(): Generator<number, void, void> {
		const count = this.#ended.length;
		for (let i = 0; i < count; i++) yield (this.#next + i) % count;
	}
}
