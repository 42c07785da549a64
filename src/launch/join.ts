/** Makes this process a rank: joins the rendezvous, which checks its identity, and opens the host's shared memory. */
import { createHmac } from "node:crypto";
import { readFileSync } from "node:fs";
import { hostname } from "node:os";
import { ABI_VERSION } from "../native/abi.ts";
import type { Library } from "../native/library.ts";
import { endWithParent, Run } from "../native/run.ts";
import { UserError } from "../system/errors.ts";
import { createHostMemory, createRun } from "./hosts.ts";
import { launcherEnded, outlivesLauncher, type Place } from "./place.ts";
import { type CreateHostMemory, joinLocalRendezvous, joinRendezvous } from "./rendezvous/client.ts";
import { rendezvousAddress } from "./rendezvous/line-connection.ts";
import type { Identity, LocalRanksMessage } from "./rendezvous/messages.ts";
import { RendezvousServer } from "./rendezvous/server.ts";

/** The identity of this process; `rank` null: the launcher. */
export function identityOf(
	rank: number | null,
	worldSize: number,
	about: { readonly library: Library; readonly version: string; readonly configuration: Identity["configuration"] },
): Identity {
	return {
		rank,
		worldSize,
		host: hostname(),
		machine: machineIdentifier(),
		pid: process.pid,
		version: about.version,
		abi: ABI_VERSION,
		library: about.library.kind,
		configuration: about.configuration,
	};
}

/**
 * Identifies the machine and its boot. For containers of one host NCCL's own variable decides which of them count as one machine.
 */
function machineIdentifier(): string {
	const given = process.env.NCCL_HOSTID;
	if (given) return given;
	try {
		return `${hostname()} ${readFileSync("/proc/sys/kernel/random/boot_id", "utf8").trim()}`;
	} catch {
		return hostname();
	}
}

/**
 * Opens the run that `place` names when all ranks have joined. Throws a UserError if the address does not answer, a rank is
 * absent after `timeoutMinutes` or differs in version or configuration, or the secret is wrong or missing.
 */
export async function joinRun(
	place: Place,
	identity: Identity,
	library: Library,
	timeoutMinutes: number,
): Promise<Run> {
	const parent = place.launcher ?? place.restarts?.agent;
	if (parent !== undefined) endWithParent(library, parent, outlivesLauncher(place) ? launcherEnded : "SIGKILL");
	const milliseconds = timeoutMinutes * 60_000;
	const address = await rendezvousAddress(place, milliseconds);
	const options = { secret: place.secret, address, ranks: place.worldSize, timeoutMinutes };
	const socketName = localSocketName(place, identity);
	if (socketName !== null && place.localRank > 0 && place.rank !== 0) {
		const path = await joinThroughFirstLocalRank(socketName, place, identity, milliseconds);
		if (path !== null) return Run.open(library, path, place.worldSize);
	}
	if (place.launcher !== null || place.rank !== 0) {
		let created: Run | null = null;
		const createMemory: CreateHostMemory = (request, addresses) => {
			const { run, port } = createHostMemory(request, addresses, library, options);
			created = run;
			return { run: run.path, port };
		};
		using localRanks =
			socketName !== null && place.localRank === 0 ? await LocalRanks.open(socketName, place, identity) : null;
		const path = await joinRendezvous({ ...place, address }, identity, milliseconds, createMemory, localRanks);
		return created ?? Run.open(library, path, place.worldSize);
	}
	requireDescriptors(place);
	using server = await RendezvousServer.open(address, place.port, place.secret, identity);
	if (socketName !== null) await server.listenLocally(socketName, place.localSize);
	await server.waitForRanks(
		Array.from({ length: place.worldSize - 1 }, (_, index) => index + 1),
		milliseconds,
	);
	return await createRun(server, identity, library, options);
}

// Checks the limit of open files against the connections that rank 0 of several hosts holds in the rendezvous.

/** Descriptors that a process needs besides: its files and pipes, unproven connections, and a margin. */
const besides = 64;

/** Connections that rank 0 holds while ranks join: one of each other host, and one of each rank of its own. */
export function connectionsOf({ localSize, worldSize }: Pick<Place, "localSize" | "worldSize">): number {
	return Math.ceil(worldSize / localSize) - 1 + localSize - 1;
}

/**
 * Throws a UserError if the system allows this process too few descriptors. Bun has raised the limit to the allowed maximum.
 * `limits`: the text of /proc/self/limits; unknown limits are accepted.
 */
export function requireDescriptors(place: Pick<Place, "localSize" | "worldSize">, limits = readLimits()): void {
	const allowed = Number(/^Max open files\s+(\d+)/m.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
	const needed = connectionsOf(place) + besides;
	if (allowed >= needed) return;
	throw new UserError(
		`Rank 0 needs ${needed} descriptors for the connections of the others, and the system allows ${allowed}: raise the hard limit of ulimit -n on its host.`,
	);
}

function readLimits(): string {
	try {
		return readFileSync("/proc/self/limits", "utf8");
	} catch {
		return "";
	}
}

// The ranks of a machine join the rendezvous through its first rank, so that rank 0 holds one connection a machine, not one a rank.
// They find the first rank at an abstract socket whose name is derived from the secret. A rank that does not find it in time, such
// as in a container of its own, joins at rank 0 by itself.

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
