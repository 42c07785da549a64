/** A failed run as data, and the place of its ranks' recordings. The sentences are the library's. */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../native/errors.ts";
import type { CallRecord, RankState, Run, RunFailure } from "../native/run.ts";

/** State of every rank when the run has failed. */
export interface Snapshot {
	readonly failure: RunFailure;
	readonly ranks: readonly { readonly state: RankState; readonly calls: readonly CallRecord[] }[];
}

/** File of a rank's recording in its folder. */
export function recordingName(rank: number): string {
	return `rank-${rank}.flight`;
}

/** Recordings in a folder, by rank. */
export function findRecordings(folder: string): string[] {
	let names: string[];
	try {
		names = readdirSync(folder);
	} catch {
		throw new UserError(`${folder}: there is no such folder of recordings (flight-recorder-dir).`);
	}
	const ranks = names.flatMap((name) => {
		const rank = /^rank-(\d+)\.flight$/.exec(name)?.[1];
		return rank === undefined ? [] : [Number(rank)];
	});
	if (ranks.length === 0) {
		throw new UserError(
			`${folder} holds no recordings (rank-N.flight): its runs have ended well, or none wrote there with --flight-recorder-dir.`,
		);
	}
	return ranks.sort((a, b) => a - b).map((rank) => join(folder, recordingName(rank)));
}

/** The latest calls are enough to find the one that is waited for. */
const recentCalls = 64;

export function takeSnapshot(run: Run, failure: RunFailure): Snapshot {
	const ranks = Array.from({ length: run.ranks }, (_, rank) => ({
		state: run.rankState(rank),
		calls: run.calls(rank, recentCalls),
	}));
	return { failure, ranks };
}
