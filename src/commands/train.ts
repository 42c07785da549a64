/** `mimo train`: trains a model, or prints its configuration, topology or schedule. */
import { availableParallelism, totalmem } from "node:os";
import { dirname, resolve } from "node:path";
import { defaultOffset } from "../config/derive.ts";
import { parseFlags } from "../config/flags.ts";
import { configurationJson, configurationTable } from "../config/print.ts";
import type { ResolvedConfiguration } from "../config/resolve.ts";
import type { Key, TrainingConfiguration } from "../config/schema.ts";
import type { Entry } from "../config/sources.ts";
import { type AgentPlace, agentFromEnvironment } from "../launch/agents/place.ts";
import { nodeFromEnvironment, startNode } from "../launch/node.ts";
import { type Place, placeFromEnvironment } from "../launch/place.ts";
import { note, warn } from "../observe/messages.ts";
import { print } from "../observe/output.ts";
import type { Topology, World } from "../parallel/index.ts";
import type { SharedDevice } from "../plan/require-memory.ts";
import { counted } from "../system/counted.ts";
import { ownProgram } from "../system/program-version.ts";
import { changesSince, storedEntries } from "../train/restart/stored-configuration.ts";
import { configurationOfArguments, configuredCommand } from "./arguments.ts";

const help = `mimo train [--preset NAME] [--config FILE.yaml] [FLAGS]

  --config FILE.yaml   Keys and values, one a line; flags win over the file, the file over the preset.
  --load FOLDER        Go on from a checkpoint. Without --config and --preset its configuration is the default of this run.
  --nproc N            Start N ranks on this host; without it, as many as the configured grids need. With torchrun's
                       variables (RANK, WORLD_SIZE, ...) this process is one rank.
  --print-config       Show every value and where it came from, and stop. With --json as JSON.
  --print-topology     Show ranks, grids, groups, lanes and routes, and stop. With --json as JSON.
  --print-schedule     Show every rank's actions over a step, and stop. With --json as JSON.
  --help WORD          Show only the flags whose name or description contains the word.

Ctrl-C stops the training after the current step, saves a checkpoint where --save names a folder, and ends with exit code 130;
a second Ctrl-C ends it at once and saves nothing. --exit-signal-handler does the same at SIGTERM and SIGUSR1, with exit code 75.`;

/** Flags that are not configuration keys, and whether they take a value. */
const ownFlags = {
	"print-config": false,
	"print-topology": false,
	"print-schedule": false,
	json: false,
	nproc: true,
} as const;

export default configuredCommand({
	name: "train",
	description: "Train a model.",
	help,
	ownFlags,
	run: async (args) => {
		const node = args.some((argument) => argument.startsWith("--print-")) ? null : nodeFromEnvironment();
		const { sequencesOfEpoch } = await import("../train/feed/data-room.ts");
		let stored: readonly Entry[] = [];
		const seats = node === null ? (placeFromEnvironment()?.worldSize ?? null) : node.nodes * node.ranksPerNode;
		const resolve = (ranks = seats) =>
			onThisMachine((gpus) =>
				configurationOfArguments(args, ownFlags, {
					beneath: (given) => {
						stored = storedEntries(given);
						return stored;
					},
					epoch: sequencesOfEpoch,
					gpus,
					ranks,
				}),
			);
		if (node === null) await bringLists(args);
		let resolved = await resolve();
		const { maxRestarts, spares } = resolved.configuration;
		const agent = maxRestarts > 0 ? agentFromEnvironment(node) : null;
		if (agent !== null) {
			if (spares > 0) resolved = await resolve(seats! - spares * agent.localSize);
			return await supervise(resolved.configuration, agent, args);
		}
		if (node !== null) process.exit(await startNode(node, [...ownProgram(), ...process.argv.slice(2)]));
		// A file may name a store too.
		const { refreshStores } = await import("../train/restart/object-stores.ts");
		if (!hasLauncher() && (await refreshStores(resolved.configuration))) resolved = await resolve();
		const text = await printout(resolved);
		if (text === null) await train({ ...resolved, notes: [...resolved.notes, ...changesSince(stored, resolved)] });
		else print(text);
	},
});

/** Starts this process's ranks and lets them go on after failures; ends the process with the run's exit code. */
async function supervise(
	configuration: TrainingConfiguration,
	place: AgentPlace,
	args: readonly string[],
): Promise<never> {
	const { topologyOf } = await import("../parallel/topology.ts");
	const { rankOptions, superviseAsAgent } = await import("./ranks.ts");
	const topology = topologyOf(configuration);
	const options = rankOptions(configuration, topology, topology.worldSize - 1);
	const { fewerLanes } = await import("./fewer-lanes.ts");
	const fewer = await fewerLanes(configuration, place.localSize, async (flags) => {
		const resolved = await configurationOfArguments([...args, ...flags], ownFlags, { beneath: storedEntries });
		return resolved.configuration;
	});
	return process.exit(await superviseAsAgent(place, { ...options, restarts: restartsOf(configuration) }, fewer));
}

function restartsOf({ maxRestarts: most, restartWindowMins: windowMinutes, spares }: TrainingConfiguration) {
	return most === 0 ? null : { most, windowMinutes, spares };
}

function hasLauncher(): boolean {
	return (placeFromEnvironment()?.launcher ?? null) !== null;
}

/** Brings the list of checkpoints in a store that a flag names, whose newest describes the run; a launcher does so for its ranks. */
async function bringLists(args: readonly string[]): Promise<void> {
	const values = parseFlags(args, ownFlags).entries;
	const given = (key: Key) => {
		const value = values.findLast((entry) => entry.key === key)?.value;
		return typeof value === "string" ? value : null;
	};
	if (hasLauncher() || !given("load")?.includes("://")) return;
	const { refreshStores } = await import("../train/restart/object-stores.ts");
	await refreshStores({
		...{ load: given("load"), stagingDir: given("staging-dir") },
		...{ save: null, pretrainedCheckpoint: null },
	});
}

/** Resolves the configuration with the number of visible GPUs where a default depends on it. */
async function onThisMachine(resolve: (gpus: number | null) => ResolvedConfiguration): Promise<ResolvedConfiguration> {
	const resolved = resolve(null);
	const { configuration: c, origins, command } = resolved;
	const decides = origins["llm-offset"].source === "derived" && defaultOffset(c, 1) !== c.llmOffset;
	const several = (placeFromEnvironment()?.worldSize ?? 1) > 1 || command.nproc !== undefined;
	if (!decides || several) return resolved;
	const { visibleGpus } = await import("../native/open-device.ts");
	return (await visibleGpus(c.device)) === 1 ? resolve(1) : resolved;
}

/** The text that a --print flag asks for; null without one. */
async function printout(resolved: ResolvedConfiguration): Promise<string | null> {
	const { command } = resolved;
	const json = "json" in command;
	if ("print-config" in command) return json ? configurationJson(resolved) : configurationTable(resolved);
	if ("print-topology" in command) {
		const { topologyJson, topologyTable } = await import("./topology.ts");
		return json ? topologyJson(resolved) : topologyTable(resolved);
	}
	if ("print-schedule" in command) {
		const { scheduleJson, scheduleTable } = await import("./topology.ts");
		return json ? scheduleJson(resolved) : scheduleTable(resolved);
	}
	return null;
}

/** Makes the checks that need no rank, then trains on every rank. */
async function train({ configuration, command, notes }: ResolvedConfiguration): Promise<void> {
	const { checkRankCount, onEveryRank, rankOptions, printsForTheRun, startsTheRun } = await import("./ranks.ts");
	if (printsForTheRun()) for (const sentence of notes) note(sentence);
	const { elasticOf } = await import("../guests/elastic/from-configuration.ts");
	elasticOf(configuration);
	const { runTraining } = await import("../train/run.ts");
	const { topologyOf } = await import("../parallel/topology.ts");
	const topology = topologyOf(configuration);
	await tryStart(configuration);
	if (startsTheRun()) {
		const { checkData } = await import("../data/check.ts");
		checkData(configuration);
	}
	checkRankCount(topology, command.nproc);
	await checkHost(configuration, topology, startsTheRun());
	const options = {
		...rankOptions(configuration, topology, topology.worldSize - 1),
		restarts: restartsOf(configuration),
	};
	const { requireMemory } = await import("../plan/require-memory.ts");
	const { requireStart } = await import("../train/restart/before-training.ts");
	const { AlgorithmCache } = await import("../train/algorithm-cache.ts");
	await onEveryRank(options, async (world) => {
		await requireMemory(configuration, world.rank, sharedDevice(configuration, world));
		const begins = placeFromEnvironment()?.launcher === null && (world.restarts?.generation ?? 0) === 0;
		if (begins && world.rank === 0) await requireStart(configuration);
		const algorithms = await AlgorithmCache.open(configuration, world);
		const exitCode = await runTraining(configuration, world);
		const kept = exitCode === 0 ? (algorithms?.keep() ?? null) : null;
		if (kept !== null && world.rank === options.reporter) note(kept);
		return exitCode;
	});
}

/** Warns about more threads than cores and about lacking recordings. Throws a UserError if the data do not fit in memory. */
async function checkHost(c: TrainingConfiguration, topology: Topology, startsTheRun: boolean): Promise<void> {
	const cores = availableParallelism();
	if (startsTheRun && c.threads > cores) {
		warn(`threads ${c.threads}: this process may use ${counted(cores, "core")}, and more threads only wait for them.`);
	}
	const { requireDataRoom } = await import("../train/feed/data-room.ts");
	const here = ranksOfHost(placeFromEnvironment(), topology.worldSize);
	const crowded = here === null ? null : requireDataRoom(c, topology, here, { memory: totalmem(), cores });
	if (crowded !== null) warn(crowded);
	if (topology.worldSize === 1 && c.flightRecorderDir !== null) {
		warn("flight-recorder-dir: a run of one process keeps no recording.");
	}
}

/**
 * A rank's device and the ranks that share it: all ranks of a host share its processor; under the shm backend several may share a
 * GPU.
 */
function sharedDevice(c: TrainingConfiguration, { rank, size, device }: World): SharedDevice {
	const { name, memoryBytes, deviceCount } = device.describe();
	const { kind } = device.library;
	const devices = kind === "cpu" ? 1 : c.distributedBackend === "shm" ? deviceCount : size;
	const ranks = Array.from({ length: size }, (_, one) => one).filter((one) => one % devices === rank % devices);
	return { name, memoryBytes, kind, ranks };
}

/** The ranks of this host, in the process that checks for all of them; null in the others. */
function ranksOfHost(place: Place | null, worldSize: number): number[] | null {
	if (place === null) return Array.from({ length: worldSize }, (_, rank) => rank);
	if (place.launcher !== null || place.localRank !== 0) return null;
	const local = Array.from({ length: place.localSize }, (_, one) => place.rank + one);
	// A world size other than the grids' is refused later.
	return local.filter((rank) => rank < worldSize);
}

/** Checks the starting checkpoint and every folder and file that the run will write; a launcher checks for its ranks. */
async function tryStart(c: TrainingConfiguration): Promise<void> {
	const place = placeFromEnvironment();
	if (place !== null && place.launcher !== null) return;
	const { requireStart } = await import("../train/restart/before-training.ts");
	// Under another launcher ranks join first, so that all report the error together.
	if (place === null) await requireStart(c);
	const { save, saveHf, flightRecorderDir, dataSkippedFile, profileFile } = c;
	const { tryFile, tryFolder } = await import("../checkpoint/save-folder.ts");
	if (save !== null) {
		const { openStore } = await import("../checkpoint/index.ts");
		const store = openStore(save, c.stagingDir);
		await store.probe();
		tryFolder(`--save ${save}`, store.folder);
	}
	// --save-hf is built beside its final path.
	if (saveHf !== null && !saveHf.includes("://")) tryFolder(`--save-hf ${saveHf}`, dirname(resolve(saveHf)), saveHf);
	if (flightRecorderDir !== null) tryFolder(`--flight-recorder-dir ${flightRecorderDir}`, flightRecorderDir);
	if (dataSkippedFile !== null) tryFile(`--data-skipped-file ${dataSkippedFile}`, dataSkippedFile);
	if (c.profileStepStart !== null) tryFile(`--profile-file ${profileFile}`, profileFile);
}
