/**
 * Starts the ranks of one host of a run over several, where an engine starts one process a host: an indexed Job or a JobSet of
 * Kubernetes, or a shell on every host. The variables are torchrun's for its own start: NNODES, NODE_RANK (or the index that
 * Kubernetes gives), NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT; Kubeflow's Trainer sets them with PET_ in front.
 */
import { counted } from "../system/counted.ts";
import { UserError } from "../system/errors.ts";
import { exitCodes, signalExit } from "../system/exit-codes.ts";
import { environmentOf, placeFromEnvironment } from "./place.ts";

export interface NodePlace {
	readonly node: number;
	readonly nodes: number;
	readonly ranksPerNode: number;
	/** Of the first host, where the ranks meet. */
	readonly address: string;
	readonly port: number;
}

type Environment = Readonly<Record<string, string | undefined>>;

/** torchrun's default. */
const defaultPort = 29500;
/** Milliseconds in which the name of the first host comes to stand for an address: its pod may start last. */
const longestWait = 600_000;
/** Milliseconds that the other ranks have to end after one has failed. */
const patience = 15_000;

/** null: no engine has started this process so. Throws a UserError that names a wrong or missing variable. */
export function nodeFromEnvironment(environment: Environment = process.env): NodePlace | null {
	const named = (name: string) => environment[name] || environment[`PET_${name}`] || undefined;
	const address = named("MASTER_ADDR");
	const asks = named("NNODES") !== undefined && named("NPROC_PER_NODE") !== undefined && address !== undefined;
	// Ranks, however they were started, may inherit the variables of the script that started them.
	if (!asks || placeFromEnvironment(environment) !== null) return null;
	const integer = (name: string, least: number, most: number, text = named(name)) => {
		const value = /^\d+$/.test(text ?? "") ? Number(text) : Number.NaN;
		if (value >= least && value <= most) return value;
		const found = text === undefined ? `no ${name}` : `${name}=${text}`;
		throw new UserError(`The environment has NNODES and ${found}; it needs an integer from ${least} to ${most}.`);
	};
	const nodes = integer("NNODES", 1, 65536);
	return {
		node: integer("NODE_RANK", 0, nodes - 1, named("NODE_RANK") ?? environment.JOB_COMPLETION_INDEX),
		nodes,
		ranksPerNode: integer("NPROC_PER_NODE", 1, 65536),
		address,
		port: integer("MASTER_PORT", 1, 65535, named("MASTER_PORT") ?? String(defaultPort)),
	};
}

/** Starts `command` for every rank of this host and resolves with the exit code when all have ended. */
export async function startNode(place: NodePlace, command: readonly string[]): Promise<number> {
	const { node, nodes, ranksPerNode: localSize, address, port } = place;
	await waitForName(address);
	const children = Array.from({ length: localSize }, (_, localRank) => {
		const ranks = { rank: node * localSize + localRank, worldSize: nodes * localSize, localRank, localSize };
		const own = environmentOf({ ...ranks, node: String(node), address, port, secret: null, launcher: null });
		return Bun.spawn([...command], {
			argv0: process.argv0,
			env: { ...process.env, ...own },
			stdio: ["ignore", "inherit", "inherit"],
		});
	});
	const forward = (signal: NodeJS.Signals | number) => {
		for (const child of children) child.kill(signal);
	};
	const signals = ["SIGTERM", "SIGUSR1", "SIGINT"] as const;
	for (const signal of signals) process.on(signal, forward);
	try {
		const codes = children.map(async (child) => {
			await child.exited;
			return child.exitCode ?? signalExit(child.signalCode as NodeJS.Signals);
		});
		// All end well, or one does not: the run then ends the others by itself.
		const all = Promise.all(codes);
		const failed = Promise.race(
			codes.map(async (code) => ((await code) === 0 ? await new Promise(() => {}) : undefined)),
		);
		await Promise.race([all, failed]);
		const timer = setTimeout(() => forward("SIGKILL"), patience);
		const ended = await all.finally(() => clearTimeout(timer));
		// The rank whose failure it was says more than those that ended because of it.
		return ended.find((code) => code !== 0 && code !== exitCodes.endedByAnother) ?? Math.max(...ended);
	} finally {
		for (const signal of signals) process.off(signal, forward);
	}
}

/** Waits until the name of the first host is known. */
async function waitForName(address: string): Promise<void> {
	for (const began = performance.now(); ; ) {
		try {
			await Bun.dns.lookup(address);
			return;
		} catch {
			if (performance.now() - began > longestWait) {
				throw new UserError(
					`MASTER_ADDR ${address} has stood for no address for ${counted(longestWait / 60_000, "minute")}.`,
				);
			}
			await Bun.sleep(1000);
		}
	}
}
