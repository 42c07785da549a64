/** Rank and world size of a process in a Slurm job step, from the variables that `srun` sets. */
import { UserError } from "../system/errors.ts";
import type { Place } from "./place.ts";
import { loopback } from "./rendezvous/line-connection.ts";
import { secretFromEnvironment } from "./secret.ts";

type Environment = Readonly<Record<string, string | undefined>>;

/** Range of rendezvous ports, chosen by job and step so that jobs on one node do not collide. */
const ports = { first: 20_000, count: 20_000 };

/** Nodes that a list may name: more than any cluster has. */
const MOST_NODES = 2 ** 20;

/** The names that the parts of a list stand for. Throws a UserError where they are more than there can be nodes. */
function expanded<Item>(list: string, parts: readonly string[], items: (part: string) => Iterable<Item>): Item[] {
	const all: Item[] = [];
	for (const part of parts) {
		for (const item of items(part)) {
			if (all.length === MOST_NODES)
				throw new UserError(`The list ${list.slice(0, 100)} stands for more than ${MOST_NODES} nodes.`);
			all.push(item);
		}
	}
	return all;
}

/**
 * Host names of a node list: "n[1-3,7],login" → n1 n2 n3 n7 login; numbers keep their leading zeros. Throws a UserError
 * where brackets do not match.
 */
export function expandNodeList(list: string): string[] {
	return expanded(list, splitOutsideBrackets(list), function* (part) {
		const open = part.indexOf("[");
		if (open < 0) {
			if (part !== "") yield part;
			return;
		}
		const close = part.indexOf("]", open);
		if (close < 0) throw new UserError(`The node list ${list} has no ] for its [.`);
		const rest = expandNodeList(part.slice(close + 1));
		for (const number of expanded(part, part.slice(open + 1, close).split(","), range)) {
			for (const tail of rest.length > 0 ? rest : [""]) yield part.slice(0, open) + number + tail;
		}
	});
}

function splitOutsideBrackets(list: string): string[] {
	const parts = [""];
	let depth = 0;
	for (const character of list) {
		if (character === "[") depth++;
		if (character === "]") depth--;
		if (character === "," && depth === 0) parts.push("");
		else parts[parts.length - 1] += character;
	}
	return parts;
}

/** "08-11" → 08 09 10 11. */
function* range(text: string): Generator<string> {
	const [, first, last] = /^(\d+)-(\d+)$/.exec(text) ?? [];
	if (first === undefined) yield text;
	else for (let i = Number(first); i <= Number(last); i++) yield String(i).padStart(first.length, "0");
}

/** Tasks of every node: "2(x3),1" → 2 2 2 1. */
export function expandTaskCounts(counts: string): number[] {
	return expanded(counts, counts.split(","), function* (part) {
		const [, tasks, times = "1"] = /^(\d+)(?:\(x(\d+)\))?$/.exec(part) ?? [];
		if (tasks === undefined)
			throw new UserError(`The environment has tasks per node ${counts}, which is not a list of counts.`);
		for (let i = 0; i < Number(times); i++) yield Number(tasks);
	});
}

/** null outside of a job step, and in a step of a single task, which may launch ranks itself. */
export function placeFromSlurm(environment: Environment = process.env): Place | null {
	const step = environment.SLURM_STEP_ID ?? environment.SLURM_STEPID;
	if (step === undefined || environment.SLURM_PROCID === undefined) return null;
	const worldSize = integer(environment, ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]);
	if (worldSize === 1) return null;
	const node = integer(environment, ["SLURM_NODEID"]);
	const counts = expandTaskCounts(given(environment, ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]));
	const hosts = expandNodeList(given(environment, ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]));
	const job = given(environment, ["SLURM_JOB_ID", "SLURM_JOBID"]);
	const port = ports.first + ((Number(job) * 16 + Number(step)) % ports.count);
	return {
		rank: integer(environment, ["SLURM_PROCID"]),
		worldSize,
		localRank: integer(environment, ["SLURM_LOCALID"]),
		localSize: counts[node] ?? worldSize,
		node: String(node),
		// A step of one node needs no name that other hosts could reach.
		address: environment.MASTER_ADDR ?? (hosts.length === 1 ? loopback : hosts[0]!),
		fallbackAddress: environment.MASTER_ADDR === undefined ? (environment.SLURM_LAUNCH_NODE_IPADDR ?? null) : null,
		port: environment.MASTER_PORT === undefined ? port : integer(environment, ["MASTER_PORT"]),
		secret: secretFromEnvironment(environment, `slurm ${job}.${step}`),
		launcher: null,
	};
}

function given(environment: Environment, names: readonly string[]): string {
	for (const name of names) if (environment[name]) return environment[name];
	throw new UserError(`The environment is that of a Slurm job step, but has no ${names.join(" or ")}.`);
}

function integer(environment: Environment, names: readonly string[]): number {
	const text = given(environment, names);
	if (!/^\d+$/.test(text)) throw new UserError(`The environment has ${names[0]}=${text}; allowed is an integer.`);
	return Number(text);
}

/** Requeues this process's job, as Slurm allows when its time is over. Returns an error message, or null. */
export async function requeueJob(environment: Environment = process.env): Promise<string | null> {
	const job = environment.SLURM_JOB_ID;
	if (job === undefined) return null;
	try {
		const child = Bun.spawn(["scontrol", "requeue", job], { stdout: "ignore", stderr: "pipe" });
		const [code, message] = await Promise.all([child.exited, new Response(child.stderr).text()]);
		return code === 0 ? null : `scontrol requeue ${job}: ${message.trim()}`;
	} catch (error) {
		return `scontrol requeue ${job}: ${(error as Error).message}`;
	}
}
