/**
 * Runs of several hosts: which rank is on which host, and how the first rank of each host creates the host's shared memory and
 * joins the tree of relays.
 */
import { createHmac, randomBytes } from "node:crypto";
import { HOST_FAN_OUT } from "../native/abi.ts";
import type { Library } from "../native/library.ts";
import { Run } from "../native/run.ts";
import { messageOf } from "../system/errors.ts";
import type { HostRequest, Identity } from "./rendezvous/messages.ts";
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
 * The key with which relays of different hosts authenticate; it is never sent. Without a secret it is derived from the nonce
 * alone, which no other user sees, since the ranks have joined on the loopback interface.
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
 * Called by rank 0 when all ranks have joined: creates the shared memory of this host, has the other hosts create theirs, and
 * sends every rank the path on its host. Throws UserErrors, which all ranks receive.
 */
export async function createRun(
	server: RendezvousServer,
	own: Identity,
	library: Library,
	options: RunOptions,
): Promise<Run> {
	let run: Run | null = null;
	try {
		const members = server.members;
		const hostOfRank = hostsOf(Array.from({ length: options.ranks }, (_, rank) => members.get(rank) ?? own));
		const { timeoutMinutes } = options;
		run = Run.createPart(library, { hostOfRank, ownHost: 0, timeoutMinutes });
		const paths = [run.path, ...(await createOnOtherHosts(server, run, hostOfRank, options))];
		server.announceRun((rank) => paths[hostOfRank[rank]!]!);
		return run;
	} catch (error) {
		server.announceFailure(messageOf(error));
		run?.fail(null, messageOf(error));
		throw error;
	}
}

/**
 * Has the other hosts create their shared memory, level by level of the tree, since a host connects to its parent's relay.
 * Returns the paths in host order.
 */
async function createOnOtherHosts(
	server: RendezvousServer,
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
	const created: { run: string; port: number; address: string | null }[] = [{ run: run.path, port, address: null }];
	for (const level of levelsOf(hosts)) {
		const parts = level.map((index) => {
			const { port, address } = created[parentOf(index)]!;
			return server.requestHostMemory(firstRanks[index]!, { placement, host: index, parent: { address, port }, nonce });
		});
		created.push(...(await Promise.all(parts)));
	}
	return created.slice(1).map((part) => part.run);
}

/** Creates the shared memory of a host other than rank 0's, on its first rank, and connects to the relay of the host's parent. */
export function createHostMemory(
	request: HostRequest,
	addresses: { readonly host: string; readonly own: string },
	library: Library,
	options: RunOptions,
): { readonly run: Run; readonly port: number } {
	const hostOfRank = hostsFrom(request.placement, options.ranks);
	const { timeoutMinutes } = options;
	const run = Run.createPart(library, { hostOfRank, ownHost: request.host, timeoutMinutes });
	try {
		const { address, port } = request.parent;
		const parent = { address: address ?? addresses.host, port };
		return { run, port: run.relay(relayKey(options.secret, request.nonce), parent, addresses.own) };
	} catch (error) {
		run[Symbol.dispose]();
		throw error;
	}
}

/** `hosts` consecutive hosts from `first` on with `ranks` consecutive ranks each: a run of equal hosts is one such triple. */
type PlacementRun = [first: number, ranks: number, hosts: number];

/** The shortest list of triples that describes `hostOfRank`. */
export function placementOf(hostOfRank: readonly number[]): PlacementRun[] {
	const runs: PlacementRun[] = [];
	for (let rank = 0; rank < hostOfRank.length; ) {
		const host = hostOfRank[rank]!;
		let ranks = 1;
		while (hostOfRank[rank + ranks] === host) ranks++;
		rank += ranks;
		const last = runs.at(-1);
		if (last !== undefined && last[1] === ranks && last[0] + last[2] === host) last[2]++;
		else runs.push([host, ranks, 1]);
	}
	return runs;
}

/** Host of each rank, at most `ranks` of them. */
export function hostsFrom(placement: readonly PlacementRun[], ranks: number): number[] {
	const hosts: number[] = [];
	for (const [first, each, count] of placement) {
		for (let host = first; host < first + count && hosts.length < ranks; host++) {
			for (let i = 0; i < each && hosts.length < ranks; i++) hosts.push(host);
		}
	}
	return hosts;
}

/** Parent of host `host` (above 0) in the tree. */
export function parentOf(host: number): number {
	return Math.floor((host - 1) / HOST_FAN_OUT);
}

/** Hosts 1 to `hosts` - 1, grouped by their distance from host 0. */
export function levelsOf(hosts: number): number[][] {
	const levels: number[][] = [];
	const depths = [0];
	for (let host = 1; host < hosts; host++) {
		const depth = depths[parentOf(host)]! + 1;
		depths.push(depth);
		levels[depth - 1] ??= [];
		levels[depth - 1]!.push(host);
	}
	return levels;
}
