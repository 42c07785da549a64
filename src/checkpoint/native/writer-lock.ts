/**
 * A folder of checkpoints has one writer. Its lock is a file `writer-N.lock` that names run, process, host and job, and
 * whose counter a thread of the process raises while the process lives: a sign of life that needs nothing of the file system
 * but exclusive creation, so that it works on network ones too. A process of the same kernel is looked at directly.
 *
 * The lock of a dead run is succeeded by that of the next number: exclusive creation decides between successors, and an
 * owner that was only asleep sees the higher number and writes no more.
 */

import { closeSync, constants, openSync, readdirSync, readFileSync, readlinkSync, rmSync, writeSync } from "node:fs";
import { hostname } from "node:os";
import { join } from "node:path";
import * as v from "valibot";
import { UserError } from "../../system/errors.ts";
import { readWholeText } from "../../system/input-file.ts";
import { fileError, isMissing } from "../../system/system-errors.ts";
import { openWorker } from "../../system/worker.ts";

const processSchema = v.object({
	host: v.string(),
	/** The kernel since it started, and the namespace that counts processes: only there a process number means something. */
	boot: v.string(),
	namespace: v.string(),
	pid: v.number(),
	/** When the kernel started the process, in its own ticks: numbers of processes are used again. */
	started: v.string(),
	/** The batch job, where there is one. */
	job: v.nullable(v.string()),
});
type ProcessIdentity = v.InferOutput<typeof processSchema>;

type Environment = Readonly<Record<string, string | undefined>>;

function jobOf({ SLURM_JOB_ID: slurm, TORCHELASTIC_RUN_ID: torchrun }: Environment): string | null {
	if (slurm) return `Slurm job ${slurm}`;
	return torchrun && torchrun !== "none" ? `torchrun job ${torchrun}` : null;
}

function ownProcess(environment: Environment = process.env): ProcessIdentity {
	return {
		host: hostname(),
		boot: readable(() => readFileSync("/proc/sys/kernel/random/boot_id", "utf8").trim()),
		namespace: readable(() => readlinkSync("/proc/self/ns/pid")),
		pid: process.pid,
		started: processStat(process.pid)?.started ?? "",
		job: jobOf(environment),
	};
}

/** Returns "" for a file that a sandbox does not show. */
function readable(read: () => string): string {
	try {
		return read();
	} catch {
		return "";
	}
}

/** "process 4711 on n012 (Slurm job 17)". */
function describeProcess({ pid, host, job }: ProcessIdentity): string {
	return `process ${pid} on ${host}${job === null ? "" : ` (${job})`}`;
}

/** Whether a process lives; null: it cannot be seen from `here`. */
function lives(process: ProcessIdentity, here: ProcessIdentity): boolean | null {
	if (process.boot !== here.boot || process.namespace !== here.namespace) return null;
	if (here.boot === "" || here.namespace === "" || here.started === "") return null;
	const stat = processStat(process.pid);
	return stat !== null && stat.started === process.started && stat.state !== "Z" && stat.state !== "X";
}

/** State and start of a process from /proc/PID/stat; null: there is no such process. */
function processStat(pid: number): { readonly state: string; readonly started: string } | null {
	let text: string;
	try {
		text = readFileSync(`/proc/${pid}/stat`, "utf8");
	} catch {
		return null;
	}
	// "PID (name) S …": the name may hold anything, so the last parenthesis counts; the start is the 22nd field.
	const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
	return { state: fields[0]!, started: fields[19]! };
}

const holderSchema = v.object({
	/** Name of the run, also in the names of its unfinished folders. */
	run: v.string(),
	/** ISO date. */
	since: v.string(),
	process: processSchema,
});
export type LockHolder = v.InferOutput<typeof holderSchema>;

/** Milliseconds. */
export interface LockTimes {
	/** Between signs of life. */
	readonly beat: number;
	/** Without a sign of life, after which a process of another host counts as dead. */
	readonly silence: number;
	/** Time to wait for another live run, which may be about to end. */
	readonly farewell: number;
	/** Time to wait for a run of the same job, which was requeued or restarted. */
	readonly handover: number;
}

export const lockTimes: LockTimes = { beat: 5000, silence: 60_000, farewell: 10_000, handover: 300_000 };

/** A lock as another thread is told of it. */
export interface LockReference {
	readonly root: string;
	readonly generation: number;
	readonly run: string;
}

/** A message to the thread that raises the counter. */
export interface HeartbeatMessage extends LockReference {
	readonly beat: number;
}

const lockPattern = /^writer-(\d+)\.lock$/;
const counterDigits = 12;
/** Bytes of the largest lock. */
const LARGEST_LOCK = 2 ** 16;

/** Whether a file of a folder is a writer's lock, by its name. */
export function isLock(name: string): boolean {
	return lockPattern.test(name);
}

function lockPath(root: string, generation: number): string {
	return join(root, `writer-${generation}.lock`);
}

/** A name for a run: part of the names of its folders. */
export function newRunName(): string {
	return crypto.randomUUID().replaceAll("-", "").slice(0, 12);
}

/** The record of this process as a lock's owner. */
export function ownHolder(run: string): LockHolder {
	return { run, since: new Date().toISOString(), process: ownProcess() };
}

/** Numbers of the locks in a folder, ascending. */
function generations(root: string): number[] {
	let names: string[];
	try {
		names = readdirSync(root);
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code === "ENOENT") return [];
		throw fileError("read", root, error);
	}
	return names
		.flatMap((name) => lockPattern.exec(name)?.[1] ?? [])
		.map(Number)
		.sort((a, b) => a - b);
}

/** The text of a lock and its owner, null where it is not (yet) written; null: there is no such file. */
function readLock(root: string, generation: number): { text: string; holder: LockHolder | null } | null {
	let text: string;
	try {
		text = readWholeText(lockPath(root, generation), LARGEST_LOCK, { followLinks: false });
	} catch (error) {
		if (isMissing(error)) return null;
		throw error;
	}
	try {
		return { text, holder: v.parse(holderSchema, JSON.parse(text.slice(counterDigits + 1))) };
	} catch {
		return { text, holder: null };
	}
}

/** Creates a lock; false: it exists. */
function createLock(root: string, generation: number, holder: LockHolder): boolean {
	let fd: number;
	try {
		fd = openSync(lockPath(root, generation), "wx");
	} catch (error) {
		if ((error as NodeJS.ErrnoException).code === "EEXIST") return false;
		throw fileError("create", lockPath(root, generation), error);
	}
	try {
		writeSync(fd, `${"0".repeat(counterDigits)}\n${JSON.stringify(holder)}\n`);
	} catch (error) {
		rmSync(lockPath(root, generation), { force: true });
		throw fileError("write", lockPath(root, generation), error);
	} finally {
		closeSync(fd);
	}
	return true;
}

/** Raises the counter of a lock; false: it belongs to another run. A lock that cannot be reached is tried again later. */
export function beatLock({ root, generation, run }: LockReference, count: number): boolean {
	try {
		const lock = readLock(root, generation);
		if (lock === null) return true;
		if (lock.holder !== null && lock.holder.run !== run) return false;
		// Closing is what brings it to other hosts of a network file system.
		const fd = openSync(lockPath(root, generation), constants.O_RDWR | constants.O_NOFOLLOW | constants.O_NONBLOCK);
		try {
			writeSync(fd, String(count).padStart(counterDigits, "0"), 0);
		} finally {
			closeSync(fd);
		}
	} catch {}
	return true;
}

/** The sentence about a lock that another run has taken over; null: the run still holds it. */
export function lockLost({ root, generation, run }: LockReference): string | null {
	const successor = generations(root).findLast((other) => other > generation);
	const other = readLock(root, successor ?? generation)?.holder;
	if (successor === undefined && (other === undefined || other === null || other.run === run)) return null;
	const by = other ? describeProcess(other.process) : "another run";
	return `${root} (--save) is written by ${by} since this run gave no sign of life.`;
}

/** The latest observation of another run's lock. */
interface Sighting {
	readonly text: string;
	/** When the text was new, by this process's own clock. */
	readonly at: number;
	/** Whether it has ever changed. */
	readonly beats: boolean;
}

/** The lock, or a sentence that says what this run waits for. */
export type Attempt =
	| { readonly lock: WriterLock; readonly waiting?: undefined }
	| { readonly lock?: undefined; readonly waiting: string };

/** A run that wants to write into a folder. */
export class WriterClaim {
	readonly #began = performance.now();
	readonly #seen = new Map<number, Sighting>();

	constructor(
		private readonly root: string,
		private readonly own: LockHolder,
		private readonly times: LockTimes = lockTimes,
		/** The flag that names the folder. */
		private readonly flag = "--save",
	) {}

	/**
	 * Looks once; to be called again, about once a second, while it waits. Throws a UserError that names the other run when
	 * that lives and has had its time to end.
	 */
	attempt(): Attempt {
		const { root, own, times } = this;
		const dead = generations(root);
		for (const generation of dead) {
			const waiting = this.#objection(generation);
			if (waiting !== null) return { waiting };
		}
		const generation = (dead.at(-1) ?? 0) + 1;
		if (!createLock(root, generation, own)) return { waiting: "another run claims it at the same time" };
		// Others may have looked before this one created its lock, or released theirs and gone since it looked.
		if (generations(root).some((other) => other !== generation && !dead.includes(other))) {
			rmSync(lockPath(root, generation), { force: true });
			return { waiting: "another run claims it at the same time" };
		}
		for (const other of dead) {
			try {
				rmSync(lockPath(root, other), { force: true });
			} catch {
				// A dead lock of another user cannot be removed; it does no harm.
			}
		}
		return { lock: new WriterLock(root, generation, own, times) };
	}

	/** A sentence that says which owner of a lock to wait for; null: the owner is dead. */
	#objection(generation: number): string | null {
		const { root, own, times, flag } = this;
		const found = readLock(root, generation);
		if (found === null) return null;
		const { text, holder } = found;
		const now = performance.now();
		const before = this.#seen.get(generation);
		if (before?.text !== text) this.#seen.set(generation, { text, at: now, beats: before !== undefined });
		const { at, beats } = this.#seen.get(generation)!;
		const life = holder === null ? null : lives(holder.process, own.process);
		if (life === false) return null;
		if (life === null && now - at >= times.silence) return null;
		const who = holder === null ? "a run that does not say its name" : describeProcess(holder.process);
		const requeued = holder !== null && holder.process.job !== null && holder.process.job === own.process.job;
		const limit = requeued ? times.handover : times.farewell;
		if (life === null && !beats && !requeued) {
			return `${who} holds ${root} (${flag}): waiting up to ${times.silence / 1000} s for a sign of its life.`;
		}
		if (now - this.#began >= limit && (life === true || beats)) {
			const since = holder === null ? "" : ` since ${holder.since}`;
			const asked = requeued ? `, and has not ended within ${limit / 1000} s` : "";
			throw new UserError(
				`${root} (${flag}) is written by ${who}${since}${asked}: one run writes to a folder at a time.`,
			);
		}
		return `${who} writes to ${root} (${flag}): waiting up to ${limit / 1000} s for its end.`;
	}
}

/** The right to write into a folder, with the thread that keeps it. */
export class WriterLock implements Disposable {
	readonly #heartbeat = openWorker("checkpoint/native/writer-lock-worker");

	constructor(
		readonly root: string,
		readonly generation: number,
		private readonly holder: LockHolder,
		{ beat }: LockTimes,
	) {
		this.#heartbeat.unref();
		this.#heartbeat.postMessage({ ...this.reference, beat } satisfies HeartbeatMessage);
	}

	get reference(): LockReference {
		return { root: this.root, generation: this.generation, run: this.holder.run };
	}

	/** Throws a UserError when another run has taken the folder over; a lock that was deleted with its folder is made again. */
	require(): void {
		if (readLock(this.root, this.generation) === null) createLock(this.root, this.generation, this.holder);
		const lost = lockLost(this.reference);
		if (lost !== null) throw new UserError(lost);
	}

	/** Releases the folder. */
	[Symbol.dispose](): void {
		this.#heartbeat.terminate();
		try {
			const lock = readLock(this.root, this.generation);
			if (lock?.holder?.run === this.holder.run) rmSync(lockPath(this.root, this.generation), { force: true });
		} catch {
			// The next writer sees that this process is gone.
		}
	}
}

/** Milliseconds between looks at another writer's lock. */
const pollInterval = 500;

/**
 * The lock of `folder`, which exists; the caller disposes it. `flag` names the folder in sentences, `say` is told of the
 * writer that is waited for. Throws a UserError that names it when it stays.
 */
export async function claimFolder(folder: string, flag: string, note: (sentence: string) => void): Promise<WriterLock> {
	const claim = new WriterClaim(folder, ownHolder(newRunName()), lockTimes, flag);
	for (let said = ""; ; ) {
		const { lock, waiting } = claim.attempt();
		if (lock !== undefined) return lock;
		if (waiting !== said) note(waiting);
		said = waiting;
		await Bun.sleep(pollInterval);
	}
}
