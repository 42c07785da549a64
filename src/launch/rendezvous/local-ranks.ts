/**
 * The other ranks of a machine, for which its first rank speaks when ranks meet: so rank 0 has a connection for each machine and not
 * for each rank. They find it at a name that no other process can know. A rank that does not find it in time, as where each rank
 * runs in a container of its own, meets rank 0 by itself.
 */
import { createHmac } from "node:crypto";
import type { Place } from "../place.ts";
import { meetNeighbour } from "./client.ts";
import type { Identity } from "./identity.ts";
import type { Word } from "./messages.ts";
import { RendezvousHost } from "./server.ts";

/** Milliseconds in which the first rank of a machine is found, and in which news of several ranks are told together. */
const patience = 15_000;
const together = 20;

/** Where the ranks of this node find its first rank: an abstract name; null where ranks meet rank 0 by themselves. */
export function roomOf(place: Place, identity: Identity): string | null {
	const { secret, localSize, worldSize, node = "" } = place;
	// Ranks of one host have a short way to rank 0; without a secret the kernel answers for ports alone.
	if (secret === null || place.launcher !== null || localSize === 1 || localSize === worldSize) return null;
	const name = createHmac("sha256", secret).update(`room ${place.address}:${place.port} ${identity.machine} ${node}`);
	return `\0mimo-${name.digest("hex")}`;
}

/**
 * Another rank than the first of its machine asks that one: resolves with the path of the run's shared memory, or with null where
 * it is not found. Throws UserErrors.
 */
export function askNeighbour(
	room: string,
	place: Place,
	identity: Identity,
	milliseconds: number,
): Promise<string | null> {
	return meetNeighbour(room, place.secret!, identity, milliseconds, Math.min(milliseconds, patience));
}

/** The first rank of a machine takes its neighbours in. */
export class Neighbours implements Disposable {
	readonly #told = new Set<number>();
	#host: RendezvousHost | null = null;
	#say: ((word: Word) => void) | null = null;
	#timer: ReturnType<typeof setTimeout> | null = null;

	private constructor() {}

	/** Without a room where its name is taken, as by a rank that another program has started here: these speak for all then. */
	static async open(room: string, place: Place, identity: Identity): Promise<Neighbours> {
		const neighbours = new Neighbours();
		try {
			const changed = () => neighbours.#change();
			neighbours.#host = await RendezvousHost.openRoom(room, place.secret!, identity, place.localSize, changed);
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "EADDRINUSE") throw error;
		}
		return neighbours;
	}

	tell(say: (word: Word) => void): void {
		this.#say = say;
		this.#change();
	}

	welcome(run: string): void {
		this.#host?.welcome(run);
	}

	refuse(reason: string): void {
		this.#host?.refuse(reason);
	}

	[Symbol.dispose](): void {
		this.#say = null;
		if (this.#timer !== null) clearTimeout(this.#timer);
		this.#host?.[Symbol.dispose]();
	}

	#change(): void {
		this.#timer ??= setTimeout(() => {
			this.#timer = null;
			this.#tellNews();
		}, together);
	}

	#tellNews(): void {
		if (this.#host === null || this.#say === null) return;
		const news = [...this.#host.members.values()].filter(({ rank }) => !this.#told.has(rank!));
		for (const { rank } of news) this.#told.add(rank!);
		const { failure, left } = this.#host;
		if (news.length > 0) this.#say({ neighbours: news.map(({ rank, pid, host }) => ({ rank: rank!, pid, host })) });
		if (failure !== null) this.#say({ trouble: failure, left });
	}
}
