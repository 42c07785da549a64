/** Runs of several hosts: which rank is where, and how the first rank of each host makes and joins its part of the run. */
import { createHmac, randomBytes } from "node:crypto";
import type { Library } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { hostsFrom, levelsOf, parentOf, placementOf } from "./host-tree.ts";
import type { Identity } from "./rendezvous/identity.ts";
import type { Lead } from "./rendezvous/messages.ts";
import type { RendezvousServer } from "./rendezvous/server.ts";

/** The index of the machine each rank is on, counted in the order of their first ranks. */
export function hostsOf(identities: readonly Pick<Identity, "machine">[]): number[] {
	const indices = new Map<string, number>();
	return identities.map(({ machine }) => {
		const index = indices.get(machine) ?? indices.size;
		indices.set(machine, index);
		return index;
	});
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
	host: RendezvousServer,
	own: Identity,
	library: Library,
	options: RunOptions,
): Promise<Run> {
	let run: Run | null = null;
	try {
		const members = host.members;
		const hostOfRank = hostsOf(Array.from({ length: options.ranks }, (_, rank) => members.get(rank) ?? own));
		const { timeoutMinutes } = options;
		run = Run.createPart(library, { hostOfRank, ownHost: 0, timeoutMinutes });
		const paths = [run.path, ...(await haveOthersMade(host, run, hostOfRank, options))];
		host.welcome((rank) => paths[hostOfRank[rank]!]!);
		return run;
	} catch (error) {
		host.refuse((error as Error).message);
		run?.fail(null, (error as Error).message);
		throw error;
	}
}

/**
 * Paths of the other hosts' shared memory, in their order. A host is asked when the one above it in the tree listens.
 */
async function haveOthersMade(
	host: RendezvousServer,
	run: Run,
	hostOfRank: readonly number[],
	{ secret, address }: RunOptions,
): Promise<string[]> {
	const firstRanks = [...new Set(hostOfRank)].map((index) => hostOfRank.indexOf(index));
	const hosts = firstRanks.length;
	if (hosts === 1) return [];
	const nonce = randomBytes(32).toString("hex");
	const placement = placementOf(hostOfRank);
	const port = run.relay(relayKey(secret, nonce), null, address);
	const made: { run: string; port: number; address: string | null }[] = [{ run: run.path, port, address: null }];
	for (const level of levelsOf(hosts)) {
		const parts = level.map((index) => {
			const { port, address } = made[parentOf(index)]!;
			return host.ask(firstRanks[index]!, { placement, host: index, parent: { address, port }, nonce });
		});
		made.push(...(await Promise.all(parts)));
	}
	return made.slice(1).map((part) => part.run);
}

/** The first rank of another host, asked to: makes the run's shared memory there and meets the relay of the host above. */
export function leadHost(
	wanted: Lead,
	addresses: { readonly host: string; readonly own: string },
	library: Library,
	options: RunOptions,
): { readonly run: Run; readonly port: number } {
	const hostOfRank = hostsFrom(wanted.placement, options.ranks);
	const { timeoutMinutes } = options;
	const run = Run.createPart(library, { hostOfRank, ownHost: wanted.host, timeoutMinutes });
	try {
		const { address, port } = wanted.parent;
		const parent = { address: address ?? addresses.host, port };
		return { run, port: run.relay(relayKey(options.secret, wanted.nonce), parent, addresses.own) };
	} catch (error) {
		run[Symbol.dispose]();
		throw error;
	}
}
