/**
 * The ranks of a machine join the rendezvous through its first rank, so that rank 0 holds one connection a machine, not one a rank.
 * They find the first rank at an abstract socket whose name is derived from the secret. A rank that does not find it in time, such
 * as in a container of its own, joins at rank 0 by itself.
 */
import { createHmac } from "node:crypto";
import type { Place } from "../place.ts";
import { joinLocalRendezvous } from "./client.ts";
import type { Identity, LocalRanksMessage } from "./messages.ts";
import { RendezvousServer } from "./server.ts";

/** Milliseconds in which the first rank of a machine has to be found. */
const searchTime = 15_000;
/** Milliseconds over which changes are collected into one message to the server. */
const batchTime = 20;

/** Name of the abstract socket at which the ranks of this node find its first rank; null: each rank joins at rank 0 by itself. */
export function localSocketName(place: Place, identity: Identity): string | null {
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
	return joinLocalRendezvous(socketName, place.secret!, identity, milliseconds, Math.min(milliseconds, searchTime));
}

/** The local server of a machine's first rank, which forwards the other ranks of the machine to the rendezvous. */
export class LocalRanks implements Disposable {
	readonly #forwarded = new Set<number>();
	#server: RendezvousServer | null = null;
	#send: ((message: LocalRanksMessage) => void) | null = null;
	#timer: ReturnType<typeof setTimeout> | null = null;

	private constructor() {}

	/** If another process holds the socket, such as a first rank that was started twice, the holder serves the local ranks. */
	static async open(socketName: string, place: Place, identity: Identity): Promise<LocalRanks> {
		const localRanks = new LocalRanks();
		try {
			const changed = () => localRanks.#scheduleUpdate();
			localRanks.#server = await RendezvousServer.openLocal(
				socketName,
				place.secret!,
				identity,
				place.localSize,
				changed,
			);
		} catch (error) {
			if ((error as NodeJS.ErrnoException).code !== "EADDRINUSE") throw error;
		}
		return localRanks;
	}

	forwardTo(send: (message: LocalRanksMessage) => void): void {
		this.#send = send;
		this.#scheduleUpdate();
	}

	announceRun(run: string): void {
		this.#server?.announceRun(run);
	}

	announceFailure(reason: string): void {
		this.#server?.announceFailure(reason);
	}

	[Symbol.dispose](): void {
		this.#send = null;
		if (this.#timer !== null) clearTimeout(this.#timer);
		this.#server?.[Symbol.dispose]();
	}

	#scheduleUpdate(): void {
		this.#timer ??= setTimeout(() => {
			this.#timer = null;
			this.#sendUpdate();
		}, batchTime);
	}

	#sendUpdate(): void {
		if (this.#server === null || this.#send === null) return;
		const added = [...this.#server.members.values()].filter(({ rank }) => !this.#forwarded.has(rank!));
		for (const { rank } of added) this.#forwarded.add(rank!);
		const { failure, disconnected } = this.#server;
		if (added.length > 0) this.#send({ localRanks: added.map(({ rank, pid, host }) => ({ rank: rank!, pid, host })) });
		if (failure !== null) this.#send({ failure, disconnected });
	}
}
