/**
 * A rank of a run on two played hosts of two ranks each. The CPU library has no collectives between hosts, so each host
 * trains for itself: its ranks train a small language model on samples of their own. Step N is due N times PERIOD
 * milliseconds after the first, and begins then, or when the one before is done.
 *
 *   bun rank.ts STEPS HOLD PERIOD
 *
 * The run expects a third host without ranks, which never comes. So the port of rank 0's relay, which closes when all hosts
 * have met and before a run's first step, stays open in training. On the second host's first rank a step is done when news of that
 * relay have come after its end, so that whatever delays the attacked thread delays steps.
 *
 * HOLD: milliseconds that the second host waits before it connects to that port.
 * Prints {"step", "due", "ended", "done", "processor"} after each step: when it was due, had ended and was done (milliseconds of the
 * machine's clock), and the milliseconds of processor time of this process, with its relay's thread, since the step before. At the end
 * {"losses": [...], "weights": SHA-256}.
 */
import { createHash } from "node:crypto";
import { ValueStore } from "../../src/checkpoint/model-store.ts";
import { readTensor } from "../../src/checkpoint/store.ts";
import { endRank } from "../../src/commands/ranks.ts";
import { configurationOf } from "../../src/config/resolve.ts";
import { nextTokenMicrobatch, withoutImages } from "../../src/data/microbatch.ts";
import { identityOf, joinRun } from "../../src/launch/join.ts";
import { placeFromEnvironment } from "../../src/launch/place.ts";
import { hybridConfig } from "../../src/models/language/from-configuration.ts";
import { HybridModel } from "../../src/models/language/model.ts";
import { Status } from "../../src/native/abi.ts";
import { Device } from "../../src/native/device.ts";
import { Run } from "../../src/native/run.ts";
import { Optimizer } from "../../src/optim/optimizer.ts";
import { StepScalars } from "../../src/optim/step-scalars.ts";
import { DataParallel } from "../../src/parallel/data-parallel.ts";
import { Grid } from "../../src/parallel/grid.ts";
import { moduleGroups } from "../../src/parallel/module-groups.ts";
import { World } from "../../src/parallel/world.ts";
import { NativeError } from "../../src/system/errors.ts";
import { TokenSlice } from "../../src/tensor/sequences.ts";
import { languageModelLoss } from "../../src/train/losses.ts";
import { RankPasses } from "../../src/train/rank-passes.ts";
import { trainStep } from "../../src/train/step.ts";
import { divisibleModel } from "../models/small.ts";
import { testLibrary } from "../support.ts";

const [steps, hold, period] = process.argv.slice(2).map(Number) as [number, number, number];
const place = placeFromEnvironment()!;
const { rank, worldSize, localSize } = place;
const library = await testLibrary();

const relay = Run.prototype.relay;
Run.prototype.relay = function (...args) {
	const [, parent] = args;
	if (parent !== null) Bun.sleepSync(hold);
	return relay.apply(this, args);
};
const createPart = Run.createPart;
// Host 1 is the one that never comes.
Run.createPart = (library, { hostOfRank, ownHost, ...options }) =>
	createPart(library, { ...options, hostOfRank: hostOfRank.map((host) => 2 * host), ownHost: 2 * ownHost });

// The CPU library refuses several hosts because its tensors cannot go there; these stay.
const about = { library, version: "test", configuration: {} };
using run = await joinRun(place, { ...identityOf(rank, worldSize, about), library: "cuda" }, library, 1);
try {
	await train();
	run.leave();
} catch (error) {
	process.exit(await endRank(run, place, error));
}

/** Resolves when the relay of rank 0 has told something after this call; at once but on the rank that hears it. */
async function news(): Promise<void> {
	if (rank !== localSize) return;
	const { received } = run.relayed();
	while (run.relayed().received === received) {
		if (run.watch() !== null) throw new NativeError("mimo_run_watch", Status.peer, "The run has failed.");
		await Bun.sleep(2);
	}
}

/** Milliseconds that this process has computed. */
function processorTime(): number {
	const { user, system } = process.cpuUsage();
	return (user + system) / 1000;
}

async function train(): Promise<void> {
	using device = Device.open(library, { threads: 1 });
	using world = World.join(device, run, rank);
	const host = Math.floor(rank / localSize);
	const shape = { tensor: 1, data: localSize, pipeline: 1, expert: localSize, expertTensor: 1 };
	const grid = new Grid("language", host * localSize, shape);
	const everyone = await world.group("host", grid.ranks);
	const groups = await moduleGroups(world, grid, { experts: 8, sequenceParallel: true });
	using model = new HybridModel(device, hybridConfig(configurationOf(divisibleModel)), {
		frozen: false,
		parallel: groups.model,
		replicas: { dense: groups.replicas.dense.size, expert: groups.replicas.expert.size },
	});
	model.initialise(7 + host);
	const replica = new DataParallel(model.parameters, groups.replicas);
	using scalars = new StepScalars(device);
	using optimizer = new Optimizer([replica], scalars, { beta1: 0.9, beta2: 0.95, epsilon: 1e-6 });
	const parts = {
		replicas: [replica],
		language: { model, routers: groups.tpDp, stages: groups.stages },
		world: everyone,
		passes: new RankPasses({
			pooled: null,
			...{
				encoders: [],
				language: model,
				placeholders: new Map(),
				edges: [],
				guests: [],
				actor: 0,
			},
			shape: {
				...{ pipeline: "language", stages: 1, virtualStages: 1, groupSize: 1, encoders: [] },
				...{ lateWeightGradients: false, overlap: null },
			},
			reduce: () => replica.startSums(),
		}),
		lossNames: [{ name: languageModelLoss }],
		lossMean: "tokens" as const,
		lanes: groups.replicas.dense.size,
		lossOwner: { group: groups.module, counts: true },
		participation: null,
		optimizer,
		scalars,
		clipGrad: 1,
		seed: 3,
		logNumZeros: false,
		logParametersNorm: true,
	};
	const losses: unknown[] = [];
	const started = Date.now();
	let used = processorTime();
	for (let step = 0; step < steps; step++) {
		const due = started + step * period;
		await Bun.sleep(Math.max(0, due - Date.now()));
		const microbatches = [withoutImages(nextTokenMicrobatch([0, 1].map((row) => sample(step, 2 * rank + row))))];
		const tokens = TokenSlice.of((rank % localSize) * 48, 48);
		losses.push(trainStep(parts, { microbatches, tokens, iteration: step, learningRate: 1e-3, weightDecay: 0.1 }, {}));
		world.progress(step + 1);
		const ended = Date.now();
		await news();
		const processor = processorTime() - used;
		used += processor;
		console.log(JSON.stringify({ step, due, ended, done: Date.now(), processor }));
	}
	using values = new ValueStore("weights", model);
	const digest = createHash("sha256");
	for (const name of [...values.tensors.keys()].sort())
		digest.update(name).update(readTensor(values, name) as Float32Array);
	console.log(JSON.stringify({ losses, weights: digest.digest("hex") }));
}

function sample(step: number, index: number): Int32Array {
	let state = 1 + step * 8 + index;
	return Int32Array.from({ length: 25 }, () => {
		state = (state * 48271 + 11) % 2147483647;
		return state % 61;
	});
}
