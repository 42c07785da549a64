/** When every action of every rank begins and ends, if passes take as long as they are said to. */
import { type Action, type Actor, describeAction } from "./actions.ts";

export interface ActorActions {
	readonly actor: Actor;
	readonly actions: readonly Action[];
}

/** Seconds, or any unit of time. */
export interface Durations {
	/** Of a pass or a sum; how long a rank is busy with a send or a receive is 0 unless said. */
	readonly of: (action: Action, actor: Actor) => number;
	/** From the end of a send until its receiver has it. */
	readonly transfer?: (action: Action) => number;
	/** Actions that all actors that have them do together, waiting for each other: the encoder's, cut over their ranks. */
	readonly together?: (action: Action) => boolean;
}

export interface Timed {
	readonly action: Action;
	readonly begin: number;
	readonly end: number;
}

export interface Simulation {
	/** In the order of the lists. */
	readonly timelines: readonly { readonly actor: Actor; readonly actions: readonly Timed[] }[];
	/** When the last rank is done. */
	readonly end: number;
}

/** Throws an Error that names the actions that wait for each other when the lists do not come to their end. */
export function simulate(lists: readonly ActorActions[], durations: Durations): Simulation {
	const timelines = lists.map(({ actor }) => ({ actor, actions: [] as Timed[] }));
	const clock = lists.map(() => 0);
	/** When a message is sent by all that send it, by its text. */
	const senders = new Map<string, number>();
	const sent = new Map<string, number[]>();
	const members = new Map<string, number[]>();
	for (const [index, { actions }] of lists.entries()) {
		for (const action of actions) {
			if (action.kind === "send") senders.set(messageOf(action), (senders.get(messageOf(action)) ?? 0) + 1);
			if (!durations.together?.(action)) continue;
			const key = describeAction(action);
			members.set(key, [...(members.get(key) ?? []), index]);
		}
	}
	const at = lists.map(() => 0);
	const current = (index: number): Action | undefined => lists[index]!.actions[at[index]!];
	const finish = (index: number, action: Action, begin: number): void => {
		const end = begin + durations.of(action, lists[index]!.actor);
		timelines[index]!.actions.push({ action, begin, end });
		clock[index] = end;
		at[index]!++;
		if (action.kind !== "send") return;
		const key = messageOf(action);
		sent.set(key, [...(sent.get(key) ?? []), end + (durations.transfer?.(action) ?? 0)]);
	};
	const advance = (index: number): boolean => {
		const action = current(index);
		if (action === undefined) return false;
		if (action.kind === "receive") {
			const key = messageOf(action);
			const arrivals = sent.get(key) ?? [];
			if (arrivals.length === 0 || arrivals.length < senders.get(key)!) return false;
			finish(index, action, Math.max(clock[index]!, ...arrivals));
			return true;
		}
		const key = describeAction(action);
		const others = members.get(key) ?? [index];
		const ready = others.every((other) => {
			const theirs = current(other);
			return theirs !== undefined && describeAction(theirs) === key;
		});
		if (!ready) return false;
		const begin = Math.max(...others.map((other) => clock[other]!));
		for (const other of others) finish(other, current(other)!, begin);
		return true;
	};
	let moved = true;
	while (moved) {
		moved = false;
		for (const index of lists.keys()) while (advance(index)) moved = true;
	}
	const waiting = lists.flatMap(({ actor }, index) => {
		const action = current(index);
		return action === undefined ? [] : [`${actorName(actor)} at "${describeAction(action)}"`];
	});
	if (waiting.length > 0) throw new Error(`Ranks wait for each other: ${waiting.join(", ")}.`);
	return { timelines, end: Math.max(0, ...clock) };
}

/** Such as "encoder" or "stage 2". */
export function actorName(actor: Actor): string {
	return actor === "encoder" ? actor : `stage ${actor}`;
}

function messageOf(action: Action & { readonly kind: "send" | "receive" }): string {
	return describeAction({ ...action, kind: "send" });
}
