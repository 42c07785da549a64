/** `mimo train` on one rank: from the resolved configuration to the finished training. */
import { createHash } from "node:crypto";
import { resolve } from "node:path";
import { isStoreUrl } from "../checkpoint/index.ts";
import { plannedIterations, wandbFolder } from "../config/derive.ts";
import { describeExpertPath, describeProjections } from "../config/fused-mlp.ts";
import { shownConfiguration } from "../config/print.ts";
import { keys, propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { decodesAsEnergon } from "../data/check.ts";
import { requeueJob } from "../launch/slurm.ts";
import { megatronFlopsPerStep } from "../models/language/counts.ts";
import { note, warn } from "../observe/messages.ts";
import { MetricsServer } from "../observe/metrics/server.ts";
import { type ObserverOptions, openObserver } from "../observe/observer.ts";
import { samplesEvent } from "../observe/run-log/writer.ts";
import { RunRecords } from "../observe/run-records.ts";
import type { Observer } from "../observe/step-report.ts";
import { TrackerProcess } from "../observe/tracker-process.ts";
import { describeChoice, describeTopology, isChoice, type World } from "../parallel/index.ts";
import { shownAddress } from "../system/addresses.ts";
import { counted } from "../system/counted.ts";
import { debug } from "../system/debug.ts";
import { messageOf } from "../system/errors.ts";
import { exitCodes } from "../system/exit-codes.ts";
import { programVersion } from "../system/program-version.ts";
import { isReportingRank, type Run } from "./assemble.ts";
import { dataPlaceOf, type RunData, readersWith } from "./feed/batch-source.ts";
import { laneOf } from "./feed/shared-batches.ts";
import { openSources } from "./feed/sources.ts";
import { dispatcherOf, openRun } from "./from-configuration.ts";
import { atTheStart, type Listener } from "./listeners.ts";
import { type TrainingSummary, trainingLoop } from "./loop.ts";
import { describeCaptions, readCaptions } from "./report/captions.ts";
import { dataSentences, introduction, rowTransports, summarise } from "./report/run-text.ts";
import { SkippedReport } from "./report/skipped-samples.ts";
import { Checkpoints } from "./restart/checkpoints.ts";
import { HuggingFaceWeights } from "./restart/hugging-face.ts";
import { KeptState } from "./restart/kept-state.ts";
import { PeftWeights } from "./restart/peft.ts";
import { claimSaveFolder } from "./restart/save-claim.ts";
import type { StartingPoint } from "./restart/starting-point.ts";
import { StateCheck } from "./wrong-results.ts";

/**
 * Trains on this rank. Collective over the world, with equal configurations. Returns the exit code; not 0 if the training is to
 * be started again, or was interrupted.
 */
export async function runTraining(given: TrainingConfiguration, world: World): Promise<number> {
	const everyone = await world.group("world", [...Array(world.size).keys()]);
	using kept = KeptState.open(given, world, warn);
	const again = (kept?.generation ?? 0) > 0;
	const say = world.rank === world.size - 1 ? note : () => {};
	const c = kept?.configuration(given, everyone) ?? given;
	const claim = await claimSaveFolder(c, everyone, say);
	using _lock = claim.lock;
	using run = await openRun(c, world);
	debug(1, "modules, their weights and groups are made");
	using weights = await HuggingFaceWeights.open(c, run, world);
	const origins = weights.load();
	const adapters = await PeftWeights.open(c, run, world);
	adapters.load();
	run.state.optimizer.refreshMasters();
	const reportWarning = isReportingRank(run) ? warn : () => {};
	// Other ranks write lists of skipped samples.
	const records = new RunRecords(warn);
	const trackers = isReportingRank(run) ? openTrackers(c) : null;
	const metrics = isReportingRank(run) ? await openMetrics(c, world.size) : null;
	const observer = isReportingRank(run) ? openReporter(c, world.size, records, { trackers, metrics }) : silent;
	let data: RunData | null = null;
	const dataState = async () => await data?.training.save?.();
	const checkpoints = new Checkpoints(c, run, {
		say: (sentence) => {
			observer.note(sentence);
			if (data !== null) observer.event?.({ kind: "save", step: null, sentence });
		},
		warn: reportWarning,
		dataState,
		saves: () => kept?.saves(),
		claim,
	});
	const check = StateCheck.open(c, run);
	const listeners: readonly Listener[] = [check, checkpoints, kept].filter((one) => one !== null);
	let exitCode = 0;
	try {
		checkpoints.requireRoom();
		introduce(c, run, world, origins, again ? silent : observer);
		if (metrics !== null && !again) observer.note(`Metrics: ${metrics.url}.`);
		const optimizerSteps = () => run.state.scalars.step.item();
		await kept?.hold({ checkpoints, optimizerSteps, dataState, check }, world, c);
		const stored = await checkpoints.restore(again);
		const restored = kept === null ? stored : kept.restore(stored, everyone);
		if (restored !== stored) {
			goOnFrom(restored!, checkpoints, run);
			kept!.confirm(restored!.progress.iteration, world.rank);
		}
		weights.requireImages(checkpoints.provenance);
		for (const guest of run.guests) await guest.load?.(c);
		const start = restored?.progress ?? atTheStart;
		for (const guest of run.guests) guest.restore?.(start.kept);
		const readers = await world.group("readers", readersWith(run.topology, world.rank));
		data = await openSources(c, dataPlaceOf(run.topology, world.rank), {
			world: run.state.world,
			lane: laneOf(readers, world.device),
			states: restored?.data ?? null,
			consumedValidSamples: start.consumedValidSamples,
			onUnlisted: (sentence) => records.miss("list of skipped samples", null, sentence),
		});
		debug(1, "the weights stand, the data are open");
		const own = trainingName(checkpoints.lineage, c.save);
		const training = kept?.training(own) ?? own;
		recordStart(observer, c, run, world, { step: start.iteration, training, restarts: kept?.generation ?? 0 });
		await trackers?.record.begun();
		const skippedReport = new SkippedReport(run.state.world, data.skipped ?? null);
		const summary = await trainingLoop(c, run, {
			world,
			data,
			skippedReport,
			observer,
			records,
			listeners,
			start,
			schedules: checkpoints.schedules,
		});
		if (summary.stop === null) {
			await weights.save(checkpoints.provenance, checkpoints.lineage, reportWarning);
			await adapters.save(checkpoints.provenance, checkpoints.lineage, reportWarning);
		}
		await conclude(c, run, { summary, data, observer, skippedReport });
		if (summary.stop?.requeue && world.rank === 0) await requeue();
		exitCode = summary.stop?.exitCode ?? 0;
	} catch (error) {
		observer.event?.({ kind: "failure", step: null, sentence: messageOf(error) });
		throw error;
	} finally {
		for (const listener of listeners) await listener.close?.();
		await data?.training.close?.();
		observer.close();
		// It has named what is missing.
		if ((await trackers?.record.complete()) === false) exitCode ||= exitCodes.failure;
	}
	return exitCode || incompleteRecords(records);
}

/** Prints what is trained, from which weights, and how experts exchange and compute rows. */
function introduce(
	c: TrainingConfiguration,
	run: Run,
	world: World,
	origins: readonly string[],
	observer: Observer,
): void {
	observer.note(introduction(c, run, world));
	for (const sentence of [...origins, ...dataSentences(c)]) observer.note(sentence);
	if (c.saveHf !== null && observer !== silent && decodesAsEnergon(c)) {
		observer.note(
			`--save-hf ${c.saveHf}: pictures are decoded as Energon does, and transformers decodes otherwise those that EXIF turns, that are transparent, or that have a palette; --image-decoding transformers trains on what it sees.`,
		);
	}
	const experts = run.languageGroups?.model.experts;
	if (experts) {
		const choice = dispatcherOf(c);
		if (isChoice(choice)) observer.note(describeChoice(experts, choice));
		observer.note(rowTransports[experts.group.rowTransport()]);
	}
	for (const line of [describeExpertPath(c), describeProjections(c)]) if (line !== null) observer.note(line);
}

/** Decodes captions after a training that reached its last step, and prints and records how the training ended. */
async function conclude(
	c: TrainingConfiguration,
	run: Run,
	{ summary, data, observer, skippedReport }: Finished,
): Promise<void> {
	const { stop, steps, progress } = summary;
	const captions = stop === null && data.captions ? await readCaptions(run, data.captions) : null;
	skippedReport.tellRest(observer, progress.iteration);
	const read = captions ? describeCaptions(captions) : [];
	if (captions) observer.event?.(samplesEvent(progress.iteration, read[0]!, captions.samples));
	observer.event?.({
		kind: stop === null ? "end" : "stop",
		step: progress.iteration,
		sentence: stop?.reason ?? [`Trained ${counted(steps, "step")}.`, ...read.slice(0, 1)].join(" "),
	});
	summarise(c, summary, data, observer, read);
}

interface Finished {
	readonly summary: TrainingSummary;
	readonly data: RunData;
	readonly observer: Observer;
	readonly skippedReport: SkippedReport;
}

/**
 * Exit code of a training whose work is done: not 0 where a record of it has gaps, so that jobs that follow, and people,
 * notice; as other programs end that go on after an error.
 */
function incompleteRecords(records: RunRecords): number {
	const gaps = records.gaps();
	for (const sentence of gaps) warn(sentence);
	return gaps.length === 0 ? 0 : exitCodes.failure;
}

/** Announces the start, or the continuation after `step`, of the training to everything that records it. */
function recordStart(
	observer: Observer,
	c: TrainingConfiguration,
	run: Run,
	world: World,
	{ step, training, restarts }: { readonly step: number; readonly training: string; readonly restarts: number },
): void {
	const start = {
		training,
		configuration: configurationDetails(c),
		arguments: process.argv.slice(2).map(shownAddress),
	};
	observer.begin?.({ step, ...start });
	observer.event?.({
		kind: "start",
		step,
		sentence: step > 0 ? `Goes on after step ${step}.` : restarts > 0 ? "Begins anew." : "A new training.",
		details: {
			train_iterations: plannedIterations(c),
			world_size: world.size,
			device: world.device.describe().name,
			flops_per_step: flopsPerStep(c),
			topology: topologyDetails(run),
			...(restarts > 0 && { restarts }),
			...start,
		},
	});
}

/** Takes over a state that a restart has copied back into this rank's tensors. */
function goOnFrom(start: StartingPoint, checkpoints: Checkpoints, { state }: Run): void {
	checkpoints.goOnFrom(start);
	for (const replica of state.replicas) replica.gather();
	for (const { buffer } of state.optimizer.shards) buffer.valuesChanged();
}

async function requeue(): Promise<void> {
	const problem = await requeueJob();
	if (problem !== null) warn(`The job is not put back into the queue: ${problem}.`);
}

/**
 * Identifies a training: equal for all runs that continue it in its folder of checkpoints. A run that continues a checkpoint in
 * another folder, or saves none, is a training of its own.
 */
function trainingName(lineage: string, save: string | null): string {
	const folder = save === null ? crypto.randomUUID() : isStoreUrl(save) ? save : resolve(save);
	return createHash("sha256").update(`${lineage}\n${folder}`).digest("hex");
}

/** Modules and lanes, for the drawing in `mimo report`. */
function topologyDetails({ topology }: Run) {
	const { worldSize, modules } = describeTopology(topology);
	return { worldSize, modules: modules.map(({ name, size, sizes, lanes }) => ({ name, size, sizes, lanes })) };
}

/** Every key that has a value, spelled as in a configuration file. */
function configurationDetails(own: TrainingConfiguration): Record<string, unknown> {
	const c = shownConfiguration(own);
	return Object.fromEntries(
		keys.map((key) => [key, c[propertyOf(key)]] as const).filter(([, value]) => value !== null),
	);
}

/** Operations of a step for the throughput; null: it is not logged. */
const flopsPerStep = (c: TrainingConfiguration) => (c.logThroughput ? megatronFlopsPerStep(c) : null);

/** Starts the process that records the run for the configured trackers; null: no tracker is configured. */
function openTrackers(c: TrainingConfiguration): ObserverOptions["trackers"] {
	const wandb = wandbFolder(c);
	const all = [
		...(c.mlflowDir === null ? [] : [["mlflow", `MLflow record in ${c.mlflowDir}`] as const]),
		...(wandb === null ? [] : [["wandb", `Weights & Biases record in ${wandb}`] as const]),
	];
	if (all.length === 0) return null;
	const record = new TrackerProcess(all.map(([name]) => name).join(","));
	return { record, name: all.map(([, name]) => name).join(" and ") };
}

/** Opens the server of metrics; null: none is configured. */
async function openMetrics(c: TrainingConfiguration, worldSize: number): Promise<MetricsServer | null> {
	if (c.metricsPort === null) return null;
	const facts = { version: programVersion(), worldSize, trainIterations: plannedIterations(c) };
	return await MetricsServer.open(c.metricsAddress, c.metricsPort, facts);
}

function openReporter(
	c: TrainingConfiguration,
	worldSize: number,
	records: RunRecords,
	sinks: Pick<ObserverOptions, "trackers" | "metrics">,
): Observer {
	return openObserver({
		logInterval: c.logInterval,
		logJson: c.logJson,
		tensorBoard: c.tensorboardDir,
		...sinks,
		interval: c.tensorboardLogInterval,
		timers: c.logTimersToTensorboard,
		trainIterations: plannedIterations(c),
		flopsPerStep: flopsPerStep(c),
		worldSize,
		records,
		view: c.terminalView,
		caution: c.moeRouterForceLoadBalancing ? "benchmark: moe-router-force-load-balancing" : null,
	});
}

/** The observer of ranks that do not report. */
const silent: Observer = { step() {}, evaluation() {}, note() {}, close() {} };
