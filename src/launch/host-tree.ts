/** Encodes compactly which host each rank is on, and arranges the hosts as a tree. */
import { HOST_FAN_OUT } from "../native/abi.ts";

/** `hosts` consecutive hosts from `first` on with `ranks` consecutive ranks each: a run of equal hosts is one such triple. */
export type PlacementRun = [first: number, ranks: number, hosts: number];

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
