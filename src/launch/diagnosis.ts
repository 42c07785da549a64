/** A failed run's state as data, and the files of its ranks' recordings. The native library writes the sentences. */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import type { CallRecord, RankState, Run, RunFailure } from "../native/run.ts";
import { UserError } from "../system/errors.ts";

/** State of every rank at the failure. */
export interface Snapshot {
	readonly failure: RunFailure;
	readonly ranks: readonly { readonly state: RankState; readonly calls: readonly CallRecord[] }[];
}

/** Name of a rank's recording in its folder. */
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

/** Number of latest calls to keep: enough to contain the one that the rank waits for. */
const recentCalls = 64;

export function takeSnapshot(run: Run, failure: RunFailure): Snapshot {
	const ranks = Array.from({ length: run.ranks }, (_, rank) => ({
		state: run.rankState(rank),
		calls: run.calls(rank, recentCalls),
	}));
	return { failure, ranks };
}
