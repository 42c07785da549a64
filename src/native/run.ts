/**
 * The memory that the ranks of one host share (mimo/run.h): which ranks live, what each waits for, and why the run
 * has failed. In a run of several hosts each has its own, and one process of each passes messages on (mimo/hosts.h).
 */

import { constants } from "node:os";
import { exitCodes } from "../system/exit-codes.ts";
import {
	Backend,
	type BackendName,
	CallState,
	type CallStateName,
	Collective,
	type CollectiveName,
	RankPhase,
	type RankPhaseName,
	RUN_PATH_BYTES,
	SENTENCE_BYTES,
	structs,
} from "./abi.ts";
import { check, type Device } from "./device.ts";
import type { Library } from "./library.ts";
import { layoutOf, readStruct, zeroTerminated } from "./structs.ts";

/** State of a rank. */
export interface RankState {
	readonly phase: RankPhaseName;
	readonly pid: number;
	readonly host: string;
	readonly module: string;
	readonly coordinates: string;
	/** The sentence it failed with, or "". */
	readonly error: string;
	/** Last finished step. */
	readonly step: number;
	/** Collectives started so far. */
	readonly calls: number;
	/** The call its training thread waits for, or null. */
	readonly waitingCall: number | null;
}

/** One collective call of a rank. */
export interface CallRecord {
	readonly group: string;
	/** Counts the rank's calls. */
	readonly call: number;
	/** Counts the group's collectives, or the messages of a pair and direction. */
	readonly sequence: number;
	readonly kind: CollectiveName;
	readonly bytes: number;
	readonly state: CallStateName;
	/** Milliseconds of the host's monotonic clock. */
	readonly started: number;
	readonly finished: number | null;
	/** Global ranks whose part was missing when it failed, at most 16 of `missingCount`. */
	readonly missing: readonly number[];
	readonly missingCount: number;
}

/** Why a run has failed: the rank to blame (null: no single one), and the sentence. */
export interface RunFailure {
	readonly rank: number | null;
	readonly reason: string;
}

/** Where a host listens, numeric. */
export interface HostAddress {
	readonly address: string;
	readonly port: number;
}

/** How many ranks of a run have joined and have finished, and the last step that all ranks have finished. */
export interface ProgressSummary {
	readonly joined: number;
	readonly finished: number;
	readonly step: number;
}

const stateLayout = layoutOf(structs.rank_state);
const recordLayout = layoutOf(structs.call_record);
/** Bytes of a line of a diagnosis at most: names, a sentence, a call and the absent ranks; and how many lines it has at most. */
const diagnosis = { lineBytes: 4 * SENTENCE_BYTES, lines: 128 };

function readString(bytes: Uint8Array): string {
	const end = bytes.indexOf(0);
	return new TextDecoder().decode(end < 0 ? bytes : bytes.subarray(0, end));
}

function nameOf<Names extends Readonly<Record<string, number>>>(names: Names, value: number): keyof Names {
	return Object.entries(names).find(([, number]) => number === value)![0];
}

export class Run implements Disposable {
	#closed = false;

	private constructor(
		readonly library: Library,
		/** Known to src/native alone. */
		readonly handle: number,
		/** The path by which other processes of this host open it, while the process that made it lives. */
		readonly path: string,
		readonly ranks: number,
	) {}

	/**
	 * Makes the shared memory of a run. `supervised`: a launcher calls watch(); otherwise the ranks watch each other.
	 * Throws a NativeError that names /dev/shm when it is full or absent.
	 */
	static create(
		library: Library,
		options: { readonly ranks: number; readonly supervised: boolean; readonly timeoutMinutes: number },
	): Run {
		const path = new Uint8Array(RUN_PATH_BYTES);
		const out = new BigUint64Array(1);
		const timeout = Math.ceil(options.timeoutMinutes * 60_000);
		check(library, "mimo_run_create", options.ranks, options.supervised ? 1 : 0, timeout, path, out);
		return new Run(library, Number(out[0]), readString(path), options.ranks);
	}

	/**
	 * Makes the shared memory of host `ownHost` of a run of several hosts, whose ranks watch each other. `hostOfRank`: the index of
	 * each rank's host; rank 0 is on host 0.
	 */
	static createPart(
		library: Library,
		options: { readonly hostOfRank: readonly number[]; readonly ownHost: number; readonly timeoutMinutes: number },
	): Run {
		const path = new Uint8Array(RUN_PATH_BYTES);
		const out = new BigUint64Array(1);
		const { hostOfRank, ownHost } = options;
		const timeout = Math.ceil(options.timeoutMinutes * 60_000);
		const hosts = Int32Array.from(hostOfRank);
		check(library, "mimo_run_create_part", hosts.length, hosts, ownHost, timeout, path, out);
		return new Run(library, Number(out[0]), readString(path), hosts.length);
	}

	/** Opens the shared memory that another process of this host has made. */
	static open(library: Library, path: string, ranks: number): Run {
		const out = new BigUint64Array(1);
		check(library, "mimo_run_open", zeroTerminated(path), out);
		return new Run(library, Number(out[0]), path, ranks);
	}

	/**
	 * A run as its ranks' recordings left it; it has failed. Throws a NativeError that names a file that is not a
	 * recording.
	 */
	static readRecordings(library: Library, paths: readonly string[]): Run {
		const out = new BigUint64Array(1);
		const ranks = new Int32Array(1);
		const names = Buffer.concat(paths.map(zeroTerminated));
		check(library, "mimo_run_read_recordings", names, paths.length, ranks, out);
		return new Run(library, Number(out[0]), "", ranks[0]!);
	}

	/** Keeps a recording of this process's rank in a file from now on, until leave(). */
	record(path: string): void {
		this.#call("mimo_run_record", zeroTerminated(path));
	}

	/**
	 * This process is `rank` from now on. Its heartbeat thread ends the process, with the diagnosis, when the run
	 * has failed and this thread has not noticed within three seconds.
	 */
	join(rank: number): void {
		this.#call("mimo_run_join", rank, exitCodes.endedByAnother);
	}

	/** How tensors of the groups that this process makes from now on move from `device` to others; the same at all ranks. */
	setBackend(device: Device, backend: BackendName): void {
		this.#call("mimo_run_set_backend", device.handle, Backend[backend]);
	}

	/**
	 * This process runs the relay of its host from now on, connected to the relay of the parent host, null at rank 0's host, and
	 * listening at the numeric address `listenAt` for the hosts below. All prove that they know `key` (32 bytes). Returns the port,
	 * or 0 without hosts below. Throws a NativeError when the parent does not listen or does not know `key`.
	 */
	relay(key: Uint8Array, parent: HostAddress | null, listenAt: string): number {
		const port = new Int32Array(1);
		const { address, port: parentPort } = parent ?? { address: "", port: 0 };
		this.#call("mimo_run_relay", key, zeroTerminated(address), parentPort, zeroTerminated(listenAt), port);
		return port[0]!;
	}

	/** Progress of the ranks of all hosts, a few tenths of a second old. */
	progressSummary(): ProgressSummary {
		const [joined, finished, step] = [new BigInt64Array(1), new BigInt64Array(1), new BigInt64Array(1)];
		this.#call("mimo_run_outlook", joined, finished, step);
		return { joined: Number(joined[0]), finished: Number(finished[0]), step: Number(step[0]) };
	}

	/** Numbers of messages that this process's relay has sent and received. */
	relayed(): { readonly sent: number; readonly received: number } {
		const [sent, received] = [new BigInt64Array(1), new BigInt64Array(1)];
		this.#call("mimo_run_relayed", sent, received);
		return { sent: Number(sent[0]), received: Number(received[0]) };
	}

	/** After a failure: waits until the hosts have exchanged the states of their ranks, at most some seconds. */
	settle(): void {
		this.#call("mimo_run_settle");
	}

	/** Sets a rank's names in diagnoses. */
	describe(rank: number, module: string, coordinates: string): void {
		this.#call("mimo_run_describe", rank, zeroTerminated(module), zeroTerminated(coordinates));
	}

	/** A step is done. */
	progress(step: number): void {
		this.#call("mimo_run_progress", step);
	}

	/** Writes a recording of any rank to a file, once: called by a launcher when the run has failed. */
	recordRank(rank: number, path: string): void {
		this.#call("mimo_run_record_rank", rank, zeroTerminated(path));
	}

	/** This rank has done all its work. */
	leave(): void {
		this.#call("mimo_run_leave");
	}

	/** Ends the run for every rank; the first failure counts. `rank` null: no rank is to blame. */
	fail(rank: number | null, sentence: string): void {
		this.#call("mimo_run_fail", rank ?? -1, zeroTerminated(sentence));
	}

	/** Called by the launcher: process `pid` will be `rank`. */
	expect(rank: number, pid: number): void {
		this.#call("mimo_run_expect", rank, pid);
	}

	/** Checks every rank; to be called a few times a second. Returns the failure of the run, or null. */
	watch(): RunFailure | null {
		const failed = new Int32Array(1);
		const rank = new Int32Array(1);
		const reason = new Uint8Array(SENTENCE_BYTES);
		this.#call("mimo_run_watch", failed, rank, reason);
		if (failed[0] === 0) return null;
		return { rank: rank[0]! < 0 ? null : rank[0]!, reason: readString(reason) };
	}

	/** The diagnosis of the failed run: a sentence with the reason, and a line for every other rank. */
	diagnosis(): string {
		const text = new Uint8Array(diagnosis.lineBytes * Math.min(this.ranks + 1, diagnosis.lines));
		this.#call("mimo_run_diagnose", text, text.byteLength);
		return readString(text);
	}

	/** The descriptor that this process prints a diagnosis to, in place of standard error. */
	printTo(descriptor: number): void {
		this.#call("mimo_run_print_to", descriptor);
	}

	/**
	 * The run has failed and this rank will end with `exitCode`. Returns when the diagnosis has been printed, by this process
	 * where neither a living launcher nor another rank does, or when that has taken too long.
	 */
	conclude(exitCode: number): void {
		this.#call("mimo_run_conclude", exitCode);
	}

	/** True for a single caller of the run, which prints the diagnosis. */
	claimDiagnosis(): boolean {
		const claimed = new Int32Array(1);
		this.#call("mimo_run_claim_diagnosis", claimed);
		return claimed[0] === 1;
	}

	rankState(rank: number): RankState {
		const bytes = new Uint8Array(stateLayout.bytes);
		this.#call("mimo_run_rank_state", rank, bytes);
		const raw = readStruct(bytes, stateLayout);
		return {
			phase: nameOf(RankPhase, raw.phase as number),
			pid: raw.pid as number,
			host: raw.host as string,
			module: raw.module as string,
			coordinates: raw.coordinates as string,
			error: raw.error as string,
			step: raw.step as number,
			calls: raw.calls as number,
			waitingCall: (raw.waiting_call as number) < 0 ? null : (raw.waiting_call as number),
		};
	}

	/** The latest calls of a rank that are still recorded, newest first. */
	calls(rank: number, most = 64): CallRecord[] {
		const bytes = new Uint8Array(recordLayout.bytes * most);
		const count = new Int32Array(1);
		this.#call("mimo_run_calls", rank, bytes, most, count);
		const records = Array.from({ length: count[0]! }, (_, index) => {
			const raw = readStruct(
				bytes.subarray(index * recordLayout.bytes, (index + 1) * recordLayout.bytes),
				recordLayout,
			);
			const missingCount = raw.missing_count as number;
			return {
				group: raw.group as string,
				call: raw.call as number,
				sequence: raw.sequence as number,
				kind: nameOf(Collective, raw.kind as number),
				bytes: raw.bytes as number,
				state: nameOf(CallState, raw.state as number),
				started: (raw.started as number) / 1e6,
				finished: raw.finished === 0 ? null : (raw.finished as number) / 1e6,
				missing: (raw.missing as number[]).slice(0, missingCount),
				missingCount,
			};
		});
		// Not all calls of a rank on another host are known.
		return records.filter(({ group }) => group !== "");
	}

	[Symbol.dispose](): void {
		if (this.#closed) return;
		this.#closed = true;
		check(this.library, "mimo_run_close", this.handle);
	}

	#call(name: string, ...args: (number | NodeJS.TypedArray)[]): void {
		if (this.#closed) throw new Error("The shared memory of a run was used after it was closed.");
		check(this.library, name, this.handle, ...args);
	}
}

/** The system sends `signal` to this process when `parent` ends, which must have started it; it ends now where that has ended. */
export function endWithParent(library: Library, parent: number, signal: NodeJS.Signals): void {
	check(library, "mimo_end_with_parent", parent, constants.signals[signal], exitCodes.endedByAnother);
}
