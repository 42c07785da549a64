/**
 * This process's rank and world size, from the environment: torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
 * MASTER_PORT), which our launcher sets too, or those of a Slurm job step.
 */
import { readSync, writeSync } from "node:fs";
import { UserError } from "../system/errors.ts";
import { loopback } from "./rendezvous/line-connection.ts";
import { secretFromEnvironment, secretVariable } from "./secret.ts";
import { placeFromSlurm } from "./slurm.ts";

export interface Place {
	readonly rank: number;
	readonly worldSize: number;
	/** Rank and number of ranks on this host. */
	readonly localRank: number;
	readonly localSize: number;
	/** The job's index of the node, of which several may be on one machine; absent: unknown. */
	readonly node?: string;
	/** Address of the rendezvous. */
	readonly address: string;
	/** Used if `address` does not resolve. */
	readonly fallbackAddress?: string | null;
	readonly port: number;
	/** null: no secret; the rendezvous is on the loopback interface of one host. */
	readonly secret: string | null;
	/** Process of our launcher, which then is the rendezvous server; null: rank 0 is. */
	readonly launcher: number | null;
	/** Absent: a failure ends the run. */
	readonly restarts?: Restarts;
}

/** A rank's part in a run that its launcher restarts after a failure. */
export interface Restarts {
	/** Number of restarts before this one. */
	readonly generation: number;
	/** Index of the run's layout: what was kept in another cannot be gone on from. */
	readonly layout: number;
	/** Path of the rank's file in the host's memory, which outlives the rank's process. */
	readonly memory: string;
	/** The same of its file for the copy of another rank's state. */
	readonly replica: string;
	/** Whether the process has no place yet, and waits for that of a lost one. */
	readonly spare?: boolean;
	/** In a run over several hosts: the process that has started this one (agents/agent.ts), which takes reports. */
	readonly agent?: number;
}

/** Where a process goes on after a failure of its run. */
export interface NextPlace extends Restarts, Pick<Place, "rank" | "localRank" | "address" | "port"> {}

type Environment = Readonly<Record<string, string | undefined>>;

/** Variables that our launcher sets. */
const launcherVariable = "MIMO_LAUNCHER_PID";
const restartsVariable = "MIMO_RESTARTS";
/** File descriptor at which ranks inherit the launcher's standard error; their own may be a pipe to it. */
export const launcherErrors = 3;
/** File descriptor at which a rank reports to its agent. */
export const agentReports = 4;

/** The signal by which a rank learns that its launcher has ended. It ends a process that does not listen to it. */
export const launcherEnded = "SIGUSR2" satisfies NodeJS.Signals;

/**
 * Whether a rank may end its step and save when its launcher has ended. Ranks of an agent may not: the other hosts count them as lost
 * with it.
 */
export function outlivesLauncher({ launcher, restarts }: Place): boolean {
	return launcher !== null && restarts !== undefined;
}

/** Whether this process is a rank that outlives its launcher, and the launcher has ended. */
export async function launcherHasEnded(): Promise<boolean> {
	const place = placeFromEnvironment();
	if (place === null || !outlivesLauncher(place)) return false;
	// The system closes a process's pipes a moment before it gives its children another parent.
	if (process.ppid === place.launcher) await Bun.sleep(100);
	return process.ppid !== place.launcher;
}

/** Tells the agent that the rank has met the others, with the path of their shared memory, or that it waits for its next place. */
export function reportToAgent(place: Place, report: { readonly met: string } | { readonly waits: number }): void {
	if (place.restarts?.agent !== undefined) writeSync(agentReports, `${JSON.stringify(report)}\n`);
}

/** null: no launcher has started this process. Throws a UserError that names a wrong or missing variable. */
export function placeFromEnvironment(environment: Environment = process.env): Place | null {
	if (environment.RANK === undefined && environment.WORLD_SIZE === undefined) return placeFromSlurm(environment);
	const worldSize = integer(environment, "WORLD_SIZE", 1);
	const rank = integer(environment, "RANK", 0, worldSize - 1);
	const localSize = integer(environment, "LOCAL_WORLD_SIZE", 1, worldSize, worldSize);
	const launcher = environment[launcherVariable];
	const restarts = environment[restartsVariable];
	const port = integer(environment, "MASTER_PORT", 1, 65535);
	const address = given(environment, "MASTER_ADDR");
	return {
		rank,
		worldSize,
		localRank: integer(environment, "LOCAL_RANK", 0, localSize - 1, rank),
		localSize,
		...(environment.GROUP_RANK === undefined ? {} : { node: environment.GROUP_RANK }),
		// LOCAL_WORLD_SIZE tells that all ranks are on this host, whatever name the launcher gives it.
		address: environment.LOCAL_WORLD_SIZE === String(worldSize) ? loopback : address,
		// torchrun's own store then listens at MASTER_PORT.
		port: environment.TORCHELASTIC_USE_AGENT_STORE === "True" ? port + 1 : port,
		secret: secretFromEnvironment(environment, environment.TORCHELASTIC_RUN_ID ?? ""),
		launcher: launcher === undefined ? null : integer(environment, launcherVariable, 1),
		...(restarts === undefined ? {} : { restarts: JSON.parse(restarts) as Restarts }),
	};
}

/** The environment variables that give a process this place. */
export function environmentOf(place: Place): Record<string, string> {
	return {
		RANK: String(place.rank),
		WORLD_SIZE: String(place.worldSize),
		LOCAL_RANK: String(place.localRank),
		LOCAL_WORLD_SIZE: String(place.localSize),
		MASTER_ADDR: place.address,
		MASTER_PORT: String(place.port),
		...(place.restarts?.agent === undefined ? {} : { TORCHELASTIC_USE_AGENT_STORE: "" }),
		...(place.node === undefined ? {} : { GROUP_RANK: place.node }),
		...(place.secret === null ? {} : { [secretVariable]: place.secret }),
		...(place.launcher === null ? {} : { [launcherVariable]: String(place.launcher) }),
		...(place.restarts === undefined ? {} : { [restartsVariable]: JSON.stringify(place.restarts) }),
	};
}

/**
 * Waits until the launcher names, on standard input, the place at which this process goes on after a failure; null: the run is over.
 * Blocks the event loop.
 */
export function nextPlace(place: Place): Place | null {
	const byte = Buffer.alloc(1);
	let line = "";
	while (readSync(0, byte) === 1) {
		const character = byte.toString("latin1");
		if (character === "\n") {
			const { rank, localRank, address, port, ...restarts } = JSON.parse(line) as NextPlace;
			return { ...place, rank, localRank, address, port, restarts };
		}
		line += character;
	}
	return null;
}

function given(environment: Environment, name: string): string {
	const value = environment[name];
	if (value === undefined || value === "") {
		throw new UserError(
			`The environment has RANK or WORLD_SIZE but no ${name}; a rank needs all of torchrun's variables.`,
		);
	}
	return value;
}

function integer(environment: Environment, name: string, least: number, most = 2 ** 31 - 1, absent?: number): number {
	if (absent !== undefined && environment[name] === undefined) return absent;
	const text = given(environment, name);
	const value = /^\d+$/.test(text) ? Number(text) : Number.NaN;
	if (!(value >= least && value <= most)) {
		const allowed = most === 2 ** 31 - 1 ? `from ${least}` : `from ${least} to ${most}`;
		throw new UserError(`The environment has ${name}=${text}; allowed is an integer ${allowed}.`);
	}
	return value;
}
