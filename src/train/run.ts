/** `mimo train` on one rank: from the resolved configuration to the finished training. */
import { createHash } from "node:crypto";
import { resolve } from "node:path";
import { hasEncoder, plannedIterations, wandbFolder } from "../config/derive.ts";
import { describeExpertPath } from "../config/fused-mlp.ts";
import { keys, propertyOf, type TrainingConfiguration } from "../config/schema.ts";
import { bigramEntropy, unigramEntropy } from "../data/text/entropy.ts";
import { requeueJob } from "../launch/slurm.ts";
import { countParameters, megatronFlopsPerStep } from "../models/hybrid/counts.ts";
import { radioParameters } from "../models/radio/names.ts";
import { encoderConfig } from "../models/vision/from-configuration.ts";
import { projectorParameters } from "../models/vision/projector.ts";
import type { RowTransportName } from "../native/abi.ts";
import { counted } from "../native/counted.ts";
import { debug } from "../native/debug.ts";
import { exitCodes } from "../native/exit-codes.ts";
import { note, warn } from "../observe/messages.ts";
import { openObserver } from "../observe/observer.ts";
import { RunRecords } from "../observe/run-records.ts";
import type { Observer } from "../observe/step-report.ts";
import { describeTopology } from "../parallel/describe-topology.ts";
import type { World } from "../parallel/world.ts";
import { elementCount } from "../tensor/tensor.ts";
import { type Run, reports } from "./assemble.ts";
import { dataPlaceOf, type RunData, readersWith } from "./feed/batch-source.ts";
import { laneOf } from "./feed/shared-batches.ts";
import { openSources } from "./feed/sources.ts";
import { openRun } from "./from-configuration.ts";
import { atTheStart, type Listener } from "./listeners.ts";
import { type TrainingSummary, trainingLoop } from "./loop.ts";
import { describeCaptions, readCaptions } from "./report/captions.ts";
import { SkippedReport } from "./report/skipped-samples.ts";
import { Checkpoints } from "./restart/checkpoints.ts";
import { HuggingFaceWeights } from "./restart/hugging-face.ts";
import { PeftWeights } from "./restart/peft.ts";
import { claimSaveFolder } from "./restart/save-claim.ts";
import { loadTeacher } from "./restart/teacher.ts";

/**
 * Trains on this rank. Collective over the world, with equal configurations. Returns the exit code; not 0 if the training is to
 * be started again, or was interrupted.
 */
export async function runTraining(c: TrainingConfiguration, world: World): Promise<number> {
	const say = world.rank === world.size - 1 ? note : () => {};
	const claim = await claimSaveFolder(c, await world.group("world", [...Array(world.size).keys()]), say);
	using _lock = claim.lock;
	using run = await openRun(c, world);
	debug(1, "modules, their weights and groups are made");
	using weights = await HuggingFaceWeights.open(c, run, world);
	const origins = weights.load();
	const adapters = await PeftWeights.open(c, run, world);
	adapters.load();
	run.state.optimizer.refreshMasters();
	const hear = reports(run) ? warn : () => {};
	const records = new RunRecords(hear);
	const observer = reports(run) ? openReporter(c, world.size, records) : silent;
	let data: RunData | null = null;
	const checkpoints = new Checkpoints(c, run, {
		say: (sentence) => {
			observer.note(sentence);
			if (data !== null) observer.event?.({ kind: "save", step: null, sentence });
		},
		warn: hear,
		dataState: async () => await data?.training.save?.(),
		claim,
	});
	const listeners: readonly Listener[] = [checkpoints];
	let exitCode = 0;
	try {
		checkpoints.requireRoom();
		observer.note(introduction(c, run, world));
		for (const sentence of origins) observer.note(sentence);
		const experts = run.groups.language?.model.experts;
		if (experts) observer.note(rowTransports[experts.group.rowTransport()]);
		const expertPath = describeExpertPath(c);
		if (expertPath !== null) observer.note(expertPath);
		const start = await checkpoints.restore();
		await loadTeacher(c, run);
		const first = start?.progress ?? atTheStart;
		const readers = await world.group("readers", readersWith(run.topology, world.rank));
		data = await openSources(c, dataPlaceOf(run.topology, world.rank), {
			world: run.state.world,
			lane: laneOf(readers, world.device),
			states: start?.data ?? null,
			consumedValidSamples: first.consumedValidSamples,
		});
		debug(1, "the weights stand, the data are open");
		observer.begin?.({
			step: first.iteration,
			training: trainingName(checkpoints.lineage, c.save),
			configuration: configurationDetails(c),
		});
		observer.event?.({
			kind: "start",
			step: first.iteration,
			sentence: first.iteration === 0 ? "A new training." : `Goes on after step ${first.iteration}.`,
			details: {
				train_iterations: plannedIterations(c),
				world_size: world.size,
				device: world.device.describe().name,
				topology: topologyDetails(run),
				configuration: configurationDetails(c),
			},
		});
		const leftOut = new SkippedReport(run.state.world, data.leftOut ?? null);
		const summary = await trainingLoop(c, run, {
			world,
			data,
			leftOut,
			observer,
			records,
			listeners,
			start: first,
			schedules: checkpoints.schedules,
		});
		if (summary.stop === null) {
			await weights.save(checkpoints.provenance, checkpoints.lineage, hear);
			await adapters.save(checkpoints.lineage, hear);
		}
		const captions = summary.stop === null && data.captions ? await readCaptions(run, data.captions) : null;
		leftOut.tellRest(observer, summary.progress.iteration);
		const read = captions ? describeCaptions(captions) : [];
		summarise(c, summary, data, observer, read);
		observer.event?.({
			kind: summary.stop === null ? "end" : "stop",
			step: summary.progress.iteration,
			sentence: summary.stop?.reason ?? [`Trained ${counted(summary.steps, "step")}.`, ...read.slice(0, 1)].join(" "),
		});
		if (summary.stop?.requeue && world.rank === 0) await requeue();
		exitCode = summary.stop?.exitCode ?? 0;
	} catch (error) {
		observer.event?.({ kind: "failure", step: null, sentence: (error as Error).message });
		throw error;
	} finally {
		for (const listener of listeners) await listener.close?.();
		await data?.training.close?.();
		observer.close();
	}
	return exitCode || incompleteRecords(records);
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

async function requeue(): Promise<void> {
	const problem = await requeueJob();
	if (problem !== null) warn(`The job is not put back into the queue: ${problem}.`);
}

/**
 * Identifies a training: equal for all runs that continue it in its folder of checkpoints. A run that continues a checkpoint in
 * another folder, or saves none, is a training of its own.
 */
function trainingName(lineage: string, save: string | null): string {
	const folder = save === null ? crypto.randomUUID() : resolve(save);
	return createHash("sha256").update(`${lineage}\n${folder}`).digest("hex");
}

/** Modules and lanes, for the drawing in `mimo report`. */
function topologyDetails({ topology }: Run) {
	const { worldSize, modules } = describeTopology(topology);
	return { worldSize, modules: modules.map(({ name, size, sizes, lanes }) => ({ name, size, sizes, lanes })) };
}

/** Every key that has a value, spelled as in a configuration file. */
function configurationDetails(c: TrainingConfiguration): Record<string, unknown> {
	return Object.fromEntries(
		keys.map((key) => [key, c[propertyOf(key)]] as const).filter(([, value]) => value !== null),
	);
}

function introduction(c: TrainingConfiguration, { topology }: Run, world: World): string {
	const { name, threads } = world.device.describe();
	const millions = (count: number) => `${(count / 1e6).toFixed(2)} M parameters`;
	const language = languageText(c, millions);
	const encoder = hasEncoder(c) ? countEncoder(c) : null;
	const what = encoder === null ? language : `${millions(encoder)} of a vision encoder and ${language}`;
	const sizes = topology.encoder
		? ` (${topology.encoder.size} for the encoder, ${topology.language.size} for the language model)`
		: "";
	const ranks = world.size === 1 ? "" : `${counted(world.size, "rank")}${sizes}, `;
	const on = `${name}, ${ranks}${counted(threads, "thread")}${world.size === 1 ? "" : " each"}`;
	return `Training ${what} on ${on}.${frozenText(c)}`;
}

/** Names the frozen parts; empty if none is frozen. */
function frozenText(c: TrainingConfiguration): string {
	const frozen = [
		...(hasEncoder(c) && c.freezeVit ? ["the vision tower"] : []),
		...(hasEncoder(c) && c.freezeProjection ? ["the projector"] : []),
		...(c.freezeLm ? ["the language model"] : []),
	];
	if (frozen.length === 0) return "";
	return ` Frozen: ${frozen.join(" and ")}.`;
}

function languageText(c: TrainingConfiguration, millions: (count: number) => string): string {
	const { total, adapters } = countParameters(c);
	const model = `${millions(total)} (${c.hybridLayerPattern})`;
	return adapters === 0 ? model : `adapters of ${millions(adapters)} for ${model}`;
}

/** Describes how rows reach experts of other ranks. */
const rowTransports = {
	host: "Rows for experts of other ranks go through the host's shared memory.",
	peers: "Rows for experts of other ranks go from GPU to GPU, which open each other's memory: the host waits for none.",
	counts:
		"Rows for experts of other ranks go as messages of NCCL, because these GPUs do not open each other's memory: the host " +
		"waits for the rows' counts in every layer of experts.",
} as const satisfies Record<RowTransportName, string>;

function countEncoder(c: TrainingConfiguration): number {
	const { tower, projector } = encoderConfig(c);
	return [...radioParameters(tower), ...projectorParameters(projector)].reduce(
		(sum, { shape }) => sum + elementCount(shape),
		0,
	);
}

function openReporter(c: TrainingConfiguration, worldSize: number, records: RunRecords): Observer {
	const wandb = wandbFolder(c);
	return openObserver({
		logInterval: c.logInterval,
		logJson: c.logJson,
		tensorBoard: c.tensorboardDir,
		mlflow:
			c.mlflowDir === null ? null : { folder: c.mlflowDir, experiment: c.mlflowExperiment, runName: c.mlflowRunName },
		wandb:
			wandb === null ? null : { folder: wandb, entity: c.wandbEntity, project: c.wandbProject, name: c.wandbExpName },
		interval: c.tensorboardLogInterval,
		timers: c.logTimersToTensorboard,
		trainIterations: plannedIterations(c),
		flopsPerStep: c.logThroughput ? megatronFlopsPerStep(c) : null,
		worldSize,
		records,
		caution: c.moeRouterForceLoadBalancing ? "benchmark: moe-router-force-load-balancing" : null,
	});
}

/** The observer of ranks that do not report. */
const silent: Observer = { step() {}, evaluation() {}, note() {}, close() {} };

function summarise(
	c: TrainingConfiguration,
	summary: TrainingSummary,
	data: RunData,
	observer: Observer,
	captions: readonly string[],
): void {
	if (summary.steps > 0) {
		observer.note(
			`Trained ${counted(summary.steps, "step")} in ${summary.seconds.toFixed(1)} s (${Math.round(summary.tokens / summary.seconds)} tokens/s): loss ${summary.firstLoss.toFixed(4)} → ${summary.lastLoss.toFixed(4)}.`,
		);
	}
	if (summary.stop !== null) observer.note(summary.stop.reason);
	if (summary.heldOutLoss !== null) {
		observer.note(`Held-out loss: ${summary.heldOutLoss.toFixed(4)} a token.`);
		for (const { budget, loss, active } of summary.heldOutBudgets) {
			const size = `${(active / 1e6).toPrecision(3)} M active parameters`;
			if (loss !== null) observer.note(`Held-out loss at budget ${budget} (${size}): ${loss.toFixed(4)} a token.`);
		}
		if (data.heldOutBytes) {
			const bits = summary.heldOutLoss / Math.LN2;
			observer.note(
				`Held-out bits per byte: ${bits.toFixed(4)} (unigram entropy of the same bytes ${unigramEntropy(data.heldOutBytes).toFixed(4)}, bigram ${bigramEntropy(data.heldOutBytes).toFixed(4)}).`,
			);
		}
	}
	for (const line of captions) observer.note(line);
	const files = [
		["log", c.logJson],
		["TensorBoard", c.tensorboardDir],
		["MLflow", c.mlflowDir],
		["Weights & Biases", wandbFolder(c)],
		["weights", c.saveHf],
		["adapters", c.savePeft],
	].filter(([, path]) => path);
	if (c.save === null && c.saveHf === null && c.savePeft === null) {
		const adapters = c.loraRank === null ? "neither --save nor --save-hf" : "none of --save, --save-hf and --save-peft";
		observer.note(`The weights are not kept: ${adapters} is given.`);
	}
	if (files.length > 0) observer.note(`Files: ${files.map(([what, path]) => `${what} ${path}`).join(", ")}.`);
}
