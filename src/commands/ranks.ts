/**
 * Runs a command's work on every rank: in this process alone, in processes that it launches, or as one rank that a launcher (ours
 * or torchrun) has started.
 */
import { mkdirSync } from "node:fs";
import { availableParallelism, totalmem } from "node:os";
import { join } from "node:path";
import { type TrainingConfiguration, textOf } from "../config/schema.ts";
import { superviseRanks } from "../launch/agents/agent.ts";
import type { Layout } from "../launch/agents/leader.ts";
import type { AgentPlace } from "../launch/agents/place.ts";
import { recordingName } from "../launch/diagnosis.ts";
import { identityOf, joinRun } from "../launch/join.ts";
import { type LaunchOptions, launch } from "../launch/launcher.ts";
import { launcherErrors, nextPlace, type Place, placeFromEnvironment, reportToAgent } from "../launch/place.ts";
import { RefusedError } from "../launch/rendezvous/client.ts";
import { type BackendName, Status } from "../native/abi.ts";
import {
	type DeviceChoice,
	type DeviceOptions,
	deviceCount,
	openDevice,
	openLibraryOf,
	requireGpus,
} from "../native/open-device.ts";
import type { Run } from "../native/run.ts";
import { beforeLine } from "../observe/progress.ts";
import { type Topology, World } from "../parallel/index.ts";
import { counted } from "../system/counted.ts";
import { debug, debugging } from "../system/debug.ts";
import { errorsOf, NativeError, UserError, WrongResult } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { ownProgram, programVersion } from "../system/program-version.ts";
import { flagError } from "./arguments.ts";
import { describeError, printStacks } from "./command.ts";

export interface RankOptions
	extends Pick<LaunchOptions, "ranks" | "describe" | "reporter" | "timeoutMinutes" | "recordings" | "restarts">,
		Pick<DeviceOptions, "threads" | "deterministic" | "graphs" | "pin"> {
	readonly device: DeviceChoice;
	/** Communication backend between GPUs. */
	readonly backend: BackendName;
	/** Settings that have to be equal on all ranks, as text. */
	readonly configuration: Readonly<Record<string, string>>;
	/** Whether to omit the line about the ranks' processes. */
	readonly quiet?: boolean;
}

/** Milliseconds to wait for the launcher to end this rank. */
const launcherPatience = 10_000;
/** Least bytes of a rank's process; the smallest model measures 100 MiB. */
const leastRankMemory = 64 * 2 ** 20;

/** Throws a UserError unless `--nproc` equals the number of ranks of the grids. */
export function checkRankCount(topology: Topology, given: string | undefined): void {
	const { worldSize } = topology;
	if (given === undefined || given === String(worldSize)) return;
	if (!/^[1-9]\d*$/.test(given)) {
		throw flagError("nproc", given, "an integer from 1");
	}
	const sizes = topology.modules.map((grid) => `${grid.name} ${grid.size}`).join(", ");
	throw new UserError(
		`--nproc ${given}: the configured grids need ${counted(worldSize, "rank")} (${sizes}).`,
		exitCodes.usage,
	);
}

/** How the ranks of a configuration's run start; `reporter`: the rank that writes to the terminal. */
export function rankOptions(c: TrainingConfiguration, topology: Topology, reporter: number): RankOptions {
	return {
		ranks: topology.worldSize,
		device: c.device,
		backend: c.distributedBackend,
		threads: c.threads,
		deterministic: c.deterministicMode,
		graphs: c.cudaGraphImpl === "local",
		pin: c.cpuAffinity === "auto",
		configuration: textOf(c),
		describe: (rank) => topology.describe(rank),
		reporter,
		timeoutMinutes: c.distributedTimeoutMinutes,
		recordings: c.flightRecorderDir,
	};
}

/**
 * Whether this process prints messages that appear once a run: the launcher does, not its ranks; under other launchers
 * only rank 0.
 */
export function printsForTheRun(): boolean {
	const place = placeFromEnvironment();
	return place === null || (place.launcher === null && place.rank === 0);
}

/** Whether this process launches the ranks, or is the only rank. */
export function startsTheRun(): boolean {
	return placeFromEnvironment() === null;
}

/** A rank's work. It may resolve with an exit code: `exitCodes.runAgain` if all ranks have agreed to stop early. */
// biome-ignore lint/suspicious/noConfusingVoidType: most work has nothing to say.
export type Work = (world: World) => Promise<number | void>;

/**
 * Resolves when the work is done on every rank; otherwise ends the process, with a diagnosis after a failure and the right exit
 * code.
 */
export async function onEveryRank(options: RankOptions, work: Work): Promise<void> {
	const exitCode = await workEverywhere(options, work);
	if (exitCode !== 0) process.exit(exitCode);
}

async function workEverywhere(options: RankOptions, work: Work): Promise<number> {
	const place = placeFromEnvironment();
	if (place !== null && place.worldSize !== options.ranks) {
		throw new UserError(
			`The configuration needs ${counted(options.ranks, "rank")}, but WORLD_SIZE is ${place.worldSize}.`,
			exitCodes.usage,
		);
	}
	const launches = place === null && (options.ranks > 1 || (options.restarts ?? null) !== null);
	if (launches) return await launchRanks(options);
	if (place === null || (options.ranks === 1 && place.launcher === null)) {
		using device = await openDevice(options.device, options);
		using world = World.alone(device);
		return (await work(world)) ?? 0;
	}
	return await workAsRank(place, options, work);
}

/** Refuses more ranks than this host, of `memory` bytes, could ever hold: starting them would bring it to a stop. */
export function requireRoom(ranks: number, memory: number): void {
	const most = Math.max(1, Math.floor(memory / leastRankMemory));
	if (ranks <= most) return;
	throw new UserError(
		`The configured grids need ${ranks} ranks, and this host's memory of ${(memory / 2 ** 30).toFixed(1)} GiB holds ${most} processes at most; torchrun or srun start ranks on several hosts.`,
		exitCodes.usage,
	);
}

/** Launches this program for every rank, with the same or with other arguments. Returns the exit code. */
export async function launchRanks(
	options: RankOptions,
	args: readonly string[] = process.argv.slice(2),
): Promise<number> {
	requireRoom(options.ranks + (options.restarts?.spares ?? 0), totalmem());
	const library = await openLibraryOf(options.device);
	if (library.kind === "cuda" && options.backend === "nccl") requireGpus(deviceCount(library), options.ranks);
	return await launch({
		...options,
		library,
		command: [...ownProgram(), ...args],
		identity: identityOf(null, options.ranks, { ...options, library, version: programVersion() }),
		log: (line, kind) => {
			if (kind === "information") {
				if (!options.quiet) process.stdout.write(`${line}\n`);
			} else process.stderr.write(`${beforeLine(process.stderr)}${line.startsWith(" ") ? "" : "mimo: "}${line}\n`);
		},
	});
}

/**
 * Starts the ranks of an agent's place in a run over several hosts, as often as its failures ask for. `fewer`: the run's forms with
 * fewer ranks, where hosts are wanting. Returns the exit code.
 */
export async function superviseAsAgent(
	place: AgentPlace,
	options: RankOptions,
	fewer: readonly Layout[],
): Promise<number> {
	const seats = place.agents * place.seats;
	const spare = options.restarts!.spares * place.localSize;
	if (seats !== options.ranks + spare) {
		const hosts = spare === 0 ? "" : ` and spares ${counted(options.restarts!.spares, "host")} of ${place.localSize}`;
		throw new UserError(
			`The configuration needs ${counted(options.ranks, "rank")}${hosts}, but ${seats} are started.`,
			exitCodes.usage,
		);
	}
	return await superviseRanks({
		place,
		command: [...ownProgram(), ...process.argv.slice(2)],
		library: await openLibraryOf(options.device),
		layouts: [{ ranks: options.ranks, flags: [] }, ...fewer],
		restarts: options.restarts!,
		program: JSON.stringify([programVersion(), options.configuration]),
		timeoutMinutes: options.timeoutMinutes,
		log: (line) => process.stderr.write(`mimo: ${line}\n`),
	});
}

/** Works as the rank of a place, and after a failure of its run as that of the next place which the launcher names. */
async function workAsRank(first: Place, options: RankOptions, work: Work): Promise<number> {
	// Later this process may be bound to fewer cores.
	const threads = options.threads || Math.max(1, Math.floor(availableParallelism() / first.localSize));
	if (first.restarts?.spare) await openLibraryOf(options.device);
	for (let place = first.restarts?.spare ? nextPlace(first) : first; place !== null; place = nextPlace(place)) {
		const exitCode = await workUntilFailure(place, { ...options, threads }, work);
		if (exitCode !== null) return exitCode;
		debug(1, "the run has failed, this process waits for its next place");
	}
	process.exit(exitCodes.endedByAnother);
}

/** null: the run has failed, not by this rank, and is perhaps restarted. Everything that the work has left on the device is freed. */
async function workUntilFailure(place: Place, options: RankOptions, work: Work): Promise<number | null> {
	const { localRank, localSize, restarts = null } = place;
	using device = await openDevice(options.device, { ...options, localRank, localSize });
	const { library } = device;
	const identity = identityOf(place.rank, place.worldSize, { ...options, library, version: programVersion() });
	using run = await joinRun(place, identity, library, options.timeoutMinutes).catch((error: Error) =>
		leaveToLauncher(place, error),
	);
	debug(1, "all ranks have met");
	reportToAgent(place, { met: run.path });
	const { module, coordinates } = options.describe(place.rank);
	run.describe(place.rank, module, coordinates);
	if (place.launcher !== null) run.printTo(launcherErrors);
	try {
		using world = World.join(device, run, place.rank, options.backend, restarts);
		if (options.recordings) record(run, options.recordings, place.rank);
		const exitCode = (await work(world)) ?? 0;
		world.leave();
		return exitCode;
	} catch (error) {
		const code = await endRank(run, place, error);
		if (code === exitCodes.endedByAnother && restarts !== null) {
			reportToAgent(place, { waits: restarts.generation });
			return null;
		}
		process.exit(code);
	}
}

/** Rethrows the error of joining; first gives the launcher, if it refused the run, time to print why and end its ranks. */
async function leaveToLauncher(place: Place, error: Error): Promise<never> {
	if (place.launcher !== null && error instanceof RefusedError) await Bun.sleep(launcherPatience);
	throw error;
}

/** Records this rank's latest calls in a file of `folder`. */
function record(run: Run, folder: string, rank: number): void {
	try {
		mkdirSync(folder, { recursive: true });
	} catch (error) {
		throw new UserError(`flight-recorder-dir ${folder} cannot be made: ${(error as Error).message}.`);
	}
	run.record(join(folder, recordingName(rank)));
}

/** Reports this rank's error to the run, in which one process prints the diagnosis. Returns the exit code. */
export async function endRank(run: Run, place: Place, error: unknown): Promise<number> {
	const { sentence, exitCode } = describeError(error);
	const [first] = errorsOf(error);
	const blamed = first instanceof WrongResult ? first.rank : place.rank;
	const heard = first instanceof NativeError && first.status === Status.peer && run.watch() !== null;
	if (!heard) run.fail(blamed, sentence);
	if (debugging(1)) printStacks(error);
	const code = heard || blamed !== place.rank ? exitCodes.endedByAnother : exitCode;
	// Lets earlier output be written first.
	await Bun.sleep(0);
	run.conclude(code);
	return code;
}
