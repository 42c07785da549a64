/** Simulates a schedule: start and end of every action of every rank, from the durations of the actions. */
import { type Action, type Actor, describeAction, type TransferAction } from "./actions.ts";

export interface ActorActions {
	readonly actor: Actor;
	readonly actions: readonly Action[];
}

/** Seconds, or any unit of time. */
export interface Durations {
	/** Duration of an action; of a send or receive only the time that it keeps the rank busy. */
	readonly of: (action: Action, actor: Actor) => number;
	/** Time from the end of a send until its receiver has the rows; default 0. */
	readonly transfer?: (action: Action) => number;
	/**
	 * Actors that return the same name execute the action together and wait for each other, such as a colocated encoder's passes, whose
	 * tensor parallelism spans several stages. null: the actor executes it alone.
	 */
	readonly together?: (action: Action, actor: Actor) => string | null;
	/** Time at which an actor is free for its first action; default 0. */
	readonly begin?: (actor: Actor) => number;
	/** Processor cores that all actors share, and how many an actor uses while it works; if they want more, all slow down alike. */
	readonly cores?: { readonly shared: number; readonly of: (actor: Actor) => number };
}

export interface Timed {
	readonly action: Action;
	readonly begin: number;
	readonly end: number;
}

export interface Simulation {
	/** A timeline for each list of actions, in their order. */
	readonly timelines: readonly { readonly actor: Actor; readonly actions: readonly Timed[] }[];
	/** Time at which the last rank is done. */
	readonly end: number;
}

/** Throws an Error that names the waiting actions if the lists deadlock. */
export function simulate(lists: readonly ActorActions[], durations: Durations): Simulation {
	const messages = new Messages(lists, durations);
	const workers = lists.map((list) => new Worker(list, durations.begin?.(list.actor) ?? 0));
	const companions = companionsOf(workers, durations.together ?? (() => null));
	let now = 0;
	/** Begins the worker's next action if it can begin now; returns whether it did. */
	const begin = (worker: Worker): boolean => {
		const action = worker.waiting(now);
		if (action === null) return false;
		if (action.kind === "receive" && !(messages.arrival(action) <= now)) return false;
		const together = companions.of(action, worker);
		const ready = together.every((one) => {
			const theirs = one.waiting(now);
			return theirs !== null && describeAction(theirs) === describeAction(action);
		});
		if (!ready) return false;
		for (const one of together) one.begin(now, durations.of(one.waiting(now)!, one.actor));
		return true;
	};
	for (;;) {
		for (let moved = true; moved; ) {
			moved = false;
			for (const worker of workers) moved = begin(worker) || moved;
			for (const worker of workers) moved = worker.finish(now, messages) || moved;
		}
		const busy = workers.filter(({ left }) => left !== null);
		const speed = speedOf(busy, durations);
		const next = Math.min(
			...busy.map(({ left }) => now + left! / speed),
			...workers.map(({ free }) => (free > now ? free : Number.POSITIVE_INFINITY)),
			messages.next(now),
		);
		if (next === Number.POSITIVE_INFINITY) break;
		for (const worker of busy) worker.work(now + worker.left! / speed <= next ? worker.left! : (next - now) * speed);
		now = next;
	}
	const stuck = workers.flatMap((worker) => {
		const action = worker.waiting(now);
		return action === null ? [] : [`${actorName(worker.actor)} at "${describeAction(action)}"`];
	});
	if (stuck.length > 0) throw new Error(`Ranks wait for each other: ${stuck.join(", ")}.`);
	return { timelines: workers.map(({ actor, done }) => ({ actor, actions: done })), end: now };
}

/** The progress of one actor through its list. */
class Worker {
	readonly actor: Actor;
	readonly done: Timed[] = [];
	/** Work left of the action that the worker has begun; null: it has begun no action. */
	left: number | null = null;
	#began = 0;

	constructor(
		readonly list: ActorActions,
		/** Time at which the worker begins. */
		readonly free: number,
	) {
		this.actor = list.actor;
	}

	/** The action that comes next; null while one is under way, before it is free, and at the end. */
	waiting(now: number): Action | null {
		return this.left === null && now >= this.free ? (this.list.actions[this.done.length] ?? null) : null;
	}

	begin(now: number, duration: number): void {
		[this.#began, this.left] = [now, duration];
	}

	work(amount: number): void {
		this.left! -= amount;
	}

	/** Whether the action under way was at its end. */
	finish(now: number, messages: Messages): boolean {
		if (this.left === null || this.left > 0) return false;
		const action = this.list.actions[this.done.length]!;
		this.done.push({ action, begin: this.#began, end: now });
		this.left = null;
		if (action.kind === "send") messages.send(action, now);
		return true;
	}
}

/** Messages on their way: a message has arrived when every sender has sent its part. */
class Messages {
	/** Parts still to be sent, and when the last of the others arrives, by the message's text. */
	readonly #parts = new Map<string, { missing: number; arrival: number }>();
	/** Times of arrival of the messages under way. */
	#arrivals: number[] = [];

	constructor(
		lists: readonly ActorActions[],
		private readonly durations: Durations,
	) {
		for (const action of lists.flatMap(({ actions }) => actions)) {
			if (action.kind !== "send") continue;
			const key = messageOf(action);
			const parts = this.#parts.get(key);
			if (parts) parts.missing++;
			else this.#parts.set(key, { missing: 1, arrival: 0 });
		}
	}

	send(action: TransferAction, now: number): void {
		const parts = this.#parts.get(messageOf(action))!;
		parts.missing--;
		parts.arrival = Math.max(parts.arrival, now + (this.durations.transfer?.(action) ?? 0));
		if (parts.missing === 0) this.#arrivals.push(parts.arrival);
	}

	/** Time at which a message arrives; Infinity: it is not sent yet. */
	arrival(action: TransferAction): number {
		const parts = this.#parts.get(messageOf(action));
		return parts === undefined || parts.missing > 0 ? Number.POSITIVE_INFINITY : parts.arrival;
	}

	/** Time at which the next message after `now` arrives. */
	next(now: number): number {
		this.#arrivals = this.#arrivals.filter((arrival) => arrival > now);
		return Math.min(...this.#arrivals);
	}
}

/** The workers that do an action together. */
function companionsOf(workers: readonly Worker[], together: NonNullable<Durations["together"]>) {
	const keyOf = (action: Action, { actor }: Worker) => {
		const name = together(action, actor);
		return name === null ? null : `${name} ${describeAction(action)}`;
	};
	const members = new Map<string, Worker[]>();
	for (const worker of workers) {
		for (const action of worker.list.actions) {
			const key = keyOf(action, worker);
			if (key !== null) members.set(key, [...(members.get(key) ?? []), worker]);
		}
	}
	return {
		of: (action: Action, worker: Worker): readonly Worker[] => members.get(keyOf(action, worker) ?? "") ?? [worker],
	};
}

/** Speed of the workers that are busy at once, at most 1. */
function speedOf(busy: readonly Worker[], { cores }: Durations): number {
	const wanted = cores ? busy.reduce((sum, { actor }) => sum + cores.of(actor), 0) : 0;
	return cores && wanted > cores.shared ? cores.shared / wanted : 1;
}

/** Such as "radio_encoder" or "stage 2". */
export function actorName(actor: Actor): string {
	return typeof actor === "string" ? actor : `stage ${actor}`;
}

function messageOf(action: TransferAction): string {
	return describeAction({ ...action, kind: "send" });
}
