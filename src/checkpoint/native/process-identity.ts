/** Identifies a process of a host, so that another process can tell whether it still lives. */
import { readFileSync, readlinkSync } from "node:fs";
import { hostname } from "node:os";
import * as v from "valibot";

export const processSchema = v.object({
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
export type ProcessIdentity = v.InferOutput<typeof processSchema>;

type Environment = Readonly<Record<string, string | undefined>>;

function jobOf({ SLURM_JOB_ID: slurm, TORCHELASTIC_RUN_ID: torchrun }: Environment): string | null {
	if (slurm) return `Slurm job ${slurm}`;
	return torchrun && torchrun !== "none" ? `torchrun job ${torchrun}` : null;
}

export function ownProcess(environment: Environment = process.env): ProcessIdentity {
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
export function describeProcess({ pid, host, job }: ProcessIdentity): string {
	return `process ${pid} on ${host}${job === null ? "" : ` (${job})`}`;
}

/** Whether a process lives; null: it cannot be seen from `here`. */
export function lives(process: ProcessIdentity, here: ProcessIdentity): boolean | null {
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
