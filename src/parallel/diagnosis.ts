/**
 * Why a run has failed, for people: the rank to blame first, then where every other rank was, and who was absent there.
 */
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { UserError } from "../native/errors.ts";
import type { CallRecord, RankState, Run, RunFailure } from "../native/run.ts";

/** What is known of every rank when the run has failed. */
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
			`${folder} holds no recordings (rank-N.flight): its runs have ended well, or none wrote there.`,
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

/** "rank 2 (language, tp 0 dp 1; host box, process 4711)". */
function describeRank(rank: number, { module, coordinates, host, pid }: RankState): string {
	const place = [module, coordinates].filter((part) => part !== "").join(", ");
	const where = [host === "" ? "" : `host ${host}`, pid === 0 ? "" : `process ${pid}`].filter((part) => part !== "");
	const about = [place, where.join(", ")].filter((part) => part !== "").join("; ");
	return about === "" ? `rank ${rank}` : `rank ${rank} (${about})`;
}

/** "language.tp all_reduce 41 (4096 bytes)". */
export function describeCall({ group, kind, sequence, bytes }: CallRecord): string {
	const name = kind.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
	return `${group} ${name} ${sequence} (${bytes} bytes)`;
}

function absentees({ missing, missingCount }: CallRecord): string {
	if (missingCount === 0) return "";
	const more = missingCount > missing.length ? ` and ${missingCount - missing.length} more` : "";
	return ` for ${missing.length === 1 ? "rank" : "ranks"} ${missing.join(", ")}${more}`;
}

/** Where a rank was that is not to blame. */
function whereabouts(state: RankState, calls: readonly CallRecord[]): string {
	const waited = calls.find(({ call }) => call === state.waitingCall);
	if (waited) return `waited in ${describeCall(waited)}${absentees(waited)}`;
	if (state.host === "") return "had not joined";
	if (state.phase === "finished") return "had finished";
	const [latest] = calls;
	const open = calls.find((call) => call.state !== "finished");
	if (open) return `was busy, with ${describeCall(open)} started but not done${absentees(open)}`;
	if (latest) return `was busy, after ${describeCall(latest)}`;
	return "was busy, before its first collective";
}

/** The last thing the rank to blame did. */
function lastAct(state: RankState, calls: readonly CallRecord[]): string {
	const step =
		state.step > 0 ? `after step ${state.step}` : state.host === "" ? "before it joined" : "in its first step";
	const [latest] = calls;
	if (!latest) return step;
	const when = latest.state === "finished" ? "its last collective was" : "in";
	return `${step}, ${when} ${describeCall(latest)}${latest.state === "finished" ? "" : absentees(latest)}`;
}

/** Lines of the diagnosis; the first is a sentence of its own. */
export function diagnose({ failure, ranks }: Snapshot): string[] {
	const blamed = failure.rank === null ? undefined : ranks[failure.rank];
	const reason = failure.reason.replace(/\.$/, "");
	const first = blamed
		? `${describeRank(failure.rank!, blamed.state)} failed: ${reason} (${lastAct(blamed.state, blamed.calls)}).`
		: `The run failed: ${reason}.`;
	const others = ranks.flatMap(({ state, calls }, rank) => {
		if (rank === failure.rank) return [];
		const own =
			state.error === "" || state.error === failure.reason ? "" : ` and failed too: ${state.error.replace(/\.$/, "")}`;
		return [`  ${describeRank(rank, state)} ${whereabouts(state, calls)}${own}.`];
	});
	return [first, ...others];
}
