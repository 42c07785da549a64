/** On which of a run's hosts each rank is: as few numbers, and as the tree that the hosts form. */
import { HOST_FAN_OUT } from "../native/abi.ts";

/**
 * Ranks in their order: `hosts` hosts from `first` on, with `ranks` ranks each. A run of equal hosts, whose ranks follow each
 * other, is one of these, however many hosts it has.
 */
export type PlacementRun = [first: number, ranks: number, hosts: number];

/** As few runs as describe `hostOfRank`. */
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

/** The host of each rank, at most `ranks` of them. */
export function hostsFrom(placement: readonly PlacementRun[], ranks: number): number[] {
	const hosts: number[] = [];
	for (const [first, each, count] of placement) {
		for (let host = first; host < first + count && hosts.length < ranks; host++) {
			for (let i = 0; i < each && hosts.length < ranks; i++) hosts.push(host);
		}
	}
	return hosts;
}

/** The host that host `host`, above 0, is connected to. */
export function parentOf(host: number): number {
	return Math.floor((host - 1) / HOST_FAN_OUT);
}

/** Hosts 1 to `hosts` - 1 by their distance from host 0. */
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
