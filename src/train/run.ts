/** Everything between a resolved configuration and a finished training. */
import type { TrainingConfiguration } from "../config/schema.ts";
import { bigramEntropy, unigramEntropy } from "../data/text/entropy.ts";
import { countParameters, megatronFlopsPerStep } from "../models/hybrid/counts.ts";
import { openObserver } from "../observe/observer.ts";
import type { Observer } from "../observe/report.ts";
import type { World } from "../parallel/world.ts";
import { loadWeights, saveWeights } from "./hugging-face.ts";
import { LanguageRun } from "./language-run.ts";
import { type TrainingSummary, trainingLoop } from "./loop.ts";
import { openSources, type Sources } from "./sources.ts";

/** Trains on this rank; every rank of the world calls it with the same configuration. */
export async function runTraining(c: TrainingConfiguration, world: World): Promise<void> {
	const sources = openSources(c);
	using run = await LanguageRun.create(c, world);
	const { model } = run;
	const origin = loadWeights(model, c, world.size > 1);
	run.refreshMasters();
	const observer = run.reports ? openReporter(c, world.size) : silent;
	try {
		const { name, threads } = world.device.describe();
		observer.note(
			`Training ${(countParameters(c).total / 1e6).toFixed(2)} M parameters (${c.hybridLayerPattern}) on ${name}, ${world.size === 1 ? "" : `${world.size} ranks, `}${threads} threads${world.size === 1 ? "" : " each"}.`,
		);
		const summary = trainingLoop(c, run, world, sources, observer);
		await saveWeights(model, c, origin);
		summarise(c, summary, sources, observer);
	} finally {
		observer.close();
	}
}

function openReporter(c: TrainingConfiguration, worldSize: number): Observer {
	return openObserver({
		logInterval: c.logInterval,
		logJson: c.logJson,
		tensorBoard:
			c.tensorboardDir === null
				? null
				: { folder: c.tensorboardDir, interval: c.tensorboardLogInterval, timers: c.logTimersToTensorboard },
		trainIterations: c.trainIters ?? Math.floor(c.trainSamples! / c.globalBatchSize),
		flopsPerStep: c.logThroughput ? megatronFlopsPerStep(c) : null,
		worldSize,
	});
}

/** Ranks that do not report say nothing. */
const silent: Observer = { step() {}, evaluation() {}, note() {}, close() {} };

function summarise(c: TrainingConfiguration, summary: TrainingSummary, sources: Sources, observer: Observer): void {
	if (summary.steps > 0) {
		observer.note(
			`Trained ${summary.steps} steps in ${summary.seconds.toFixed(1)} s (${Math.round(summary.tokens / summary.seconds)} tokens/s): loss ${summary.firstLoss.toFixed(4)} → ${summary.lastLoss.toFixed(4)}.`,
		);
	}
	if (summary.heldOutLoss !== null) {
		observer.note(`Held-out loss: ${summary.heldOutLoss.toFixed(4)} a token.`);
		if (sources.heldOutBytes) {
			const bits = summary.heldOutLoss / Math.LN2;
			observer.note(
				`Held-out bits per byte: ${bits.toFixed(4)} (unigram entropy of the same bytes ${unigramEntropy(sources.heldOutBytes).toFixed(4)}, bigram ${bigramEntropy(sources.heldOutBytes).toFixed(4)}).`,
			);
		}
	}
	const files = [
		["log", c.logJson],
		["TensorBoard", c.tensorboardDir],
		["weights", c.saveHf],
	].filter(([, path]) => path);
	if (files.length > 0) observer.note(`Files: ${files.map(([what, path]) => `${what} ${path}`).join(", ")}.`);
}
