/**
 * Runs of several hosts: which rank is on which host, and how the first rank of each host creates the host's shared memory and
 * joins the tree of relays.
 */
import { createHmac, randomBytes } from "node:crypto";
import type { Library } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { hostsFrom, levelsOf, parentOf, placementOf } from "./host-tree.ts";
import type { Identity } from "./rendezvous/identity.ts";
import type { Lead } from "./rendezvous/messages.ts";
import type { RendezvousServer } from "./rendezvous/server.ts";

/** Index of each rank's machine, in the order of the machines' first ranks. */
export function hostsOf(identities: readonly Pick<Identity, "machine">[]): number[] {
	const indices = new Map<string, number>();
	return identities.map(({ machine }) => {
		const index = indices.get(machine) ?? indices.size;
		indices.set(machine, index);
		return index;
	});
}

/**
 * The key with which relays of different hosts authenticate; never sent. Without a secret it is derived from the nonce alone,
 * which no other user sees, since the ranks have joined on the loopback interface.
 */
function relayKey(secret: string | null, nonce: string): Uint8Array {
	return createHmac("sha256", secret ?? "")
		.update(`relay ${nonce}`)
		.digest();
}

export interface RunOptions {
	readonly secret: string | null;
	/** Numeric address of rank 0's host. */
	readonly address: string;
	readonly ranks: number;
	readonly timeoutMinutes: number;
}

/**
 * Called by rank 0 when all ranks have joined: creates the shared memory of this host, has it created on every other machine, and
 * sends every rank its path. Throws UserErrors, which all ranks receive.
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
 * Has the other hosts' shared memory created; returns the paths in host order. A host is asked once its parent in the tree
 * listens.
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

/**
 * On the first rank of another host, at rank 0's request: creates the host's shared memory and connects to the parent's relay.
 */
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
