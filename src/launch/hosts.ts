/** Runs of several hosts: which rank is where, and how the first rank of each host makes and joins its part of the run. */
import { createHmac, randomBytes } from "node:crypto";
import type { Library } from "../native/library.ts";
import { Run } from "../native/run.ts";
import type { Identity } from "./identity.ts";
import type { Lead, RendezvousHost } from "./rendezvous.ts";

/** The index of the machine each rank is on, counted in the order of their first ranks. */
export function hostsOf(identities: readonly Pick<Identity, "machine">[]): number[] {
	const machines = [...new Set(identities.map(({ machine }) => machine))];
	return identities.map(({ machine }) => machines.indexOf(machine));
}

/**
 * The key that relays of different hosts prove to each other to know; it is never sent. Without a secret it is as
 * secret as the nonce, which no other user sees: the ranks have met on the loopback interface.
 */
function relayKey(secret: string | null, nonce: string): Uint8Array {
	return createHmac("sha256", secret ?? "")
		.update(`relay ${nonce}`)
		.digest();
}

export interface RunOptions {
	readonly secret: string | null;
	/** Where the ranks have met: numeric, of rank 0's host. */
	readonly address: string;
	readonly ranks: number;
	readonly timeoutMinutes: number;
}

/**
 * Called by rank 0 when all ranks have met at `host`: makes the run's shared memory here, has it made on every other
 * machine, and tells all ranks where it is. Throws UserErrors, which all ranks receive.
 */
export async function makeRun(
	host: RendezvousHost,
	own: Identity,
	library: Library,
	options: RunOptions,
): Promise<Run> {
	let run: Run | null = null;
	try {
		run = Run.create(library, { ...options, supervised: false });
		const hostOfRank = hostsOf(Array.from({ length: options.ranks }, (_, rank) => host.members.get(rank) ?? own));
		const paths = [run.path, ...(await haveOthersMade(host, run, hostOfRank, options))];
		host.welcome((rank) => paths[hostOfRank[rank]!]!);
		return run;
	} catch (error) {
		host.refuse((error as Error).message);
		run?.fail(null, (error as Error).message);
		throw error;
	}
}

/** Paths of the other machines' shared memory, in their order. */
async function haveOthersMade(
	host: RendezvousHost,
	run: Run,
	hostOfRank: readonly number[],
	{ secret, address }: RunOptions,
): Promise<string[]> {
	const others = Math.max(...hostOfRank);
	if (others === 0) return [];
	run.place(hostOfRank, 0);
	const nonce = randomBytes(32).toString("hex");
	const port = run.listenForHosts(address, relayKey(secret, nonce));
	const firstRanks = Array.from({ length: others }, (_, index) => hostOfRank.indexOf(index + 1));
	return await Promise.all(
		firstRanks.map((rank, index) => host.ask(rank, { hostOfRank: [...hostOfRank], host: index + 1, port, nonce })),
	);
}

/** The first rank of another machine, asked to: makes the run's shared memory there and meets rank 0's process at `address`. */
export function leadHost(wanted: Lead, address: string, library: Library, options: RunOptions): Run {
	const run = Run.create(library, { ...options, supervised: false });
	try {
		run.place(wanted.hostOfRank, wanted.host);
		run.connectToHost(address, wanted.port, relayKey(options.secret, wanted.nonce));
		return run;
	} catch (error) {
		run[Symbol.dispose]();
		throw error;
	}
}
