/**
 * The ranks of a machine join the rendezvous through its first rank, so that rank 0 holds one connection a machine, not one a rank.
 * They find the first rank at an abstract socket whose name is derived from the secret. A rank that does not find it in time, such
 * as in a container of its own, joins at rank 0 by itself.
 */
import { createHmac } from "node:crypto";
import type { Place } from "../place.ts";
import { joinLocalRendezvous } from "./client.ts";
import type { Identity } from "./identity.ts";
import type { LocalRanksMessage } from "./messages.ts";
import { RendezvousServer } from "./server.ts";

/** Milliseconds in which the first rank of a machine has to be found. */
const patience = 15_000;
/** Milliseconds over which changes are collected into one message to the server. */
const together = 20;

/** Name of the abstract socket at which the ranks of this node find its first rank; null: each rank joins at rank 0 by itself. */
export function localSocketOf(place: Place, identity: Identity): string | null {
	const { secret, localSize, worldSize, node = "" } = place;
	// In a run of one host every rank reaches rank 0 directly. Without a secret the kernel vouches for the owner of TCP ports only.
	if (secret === null || place.launcher !== null || localSize === 1 || localSize === worldSize) return null;
	const name = createHmac("sha256", secret).update(
		`local ranks ${place.address}:${place.port} ${identity.machine} ${node}`,
	);
	return `\0mimo-${name.digest("hex")}`;
}

/**
 * Joins through the first rank of this machine, which this rank is not. Resolves with the path of the run's shared memory, or with
 * null if the first rank is not found. Throws UserErrors.
 */
export function joinThroughFirstLocalRank(
	socketName: string,
	place: Place,
	identity: Identity,
	milliseconds: number,
): Promise<string | null> {
	return joinLocalRendezvous(socketName, place.secret!, identity, milliseconds, Math.min(milliseconds, patience));
}

/** The local server of a machine's first rank, which forwards the other ranks of the machine to the rendezvous. */
export class LocalRanks implements Disposable {
	readonly #told = new Set<number>();
	#host: RendezvousServer | null = null;
	#say: ((word: LocalRanksMessage) => void) | null = null;
	#timer: ReturnType<typeof setTimeout> | null = null;

	private constructor() {}

	/** If another process holds the socket, such as a first rank that was started twice, the holder serves the local ranks. */
	static async open(socketName: string, place: Place, identity: Identity): Promise<LocalRanks> {
		const neighbours = new LocalRanks();
		try {
			const changed = () => neighbours.#change();
			neighbours.#host = await RendezvousServer.openLocal(
				socketName,
				place.secret!,
				identity,
				place.localSize,
				changed,
			);
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "EADDRINUSE") throw error;
		}
		return neighbours;
	}

	tell(say: (word: LocalRanksMessage) => void): void {
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
