/**
 * Rank program of language.test.ts: a small language model on a layout, from a checkpoint or from the start, trained on
 * samples that are the same whatever the layout. Prints losses and a digest of the parameters and optimizer of this rank.
 */
import { openStore } from "../../../src/checkpoint/remote/checkpoint-store.ts";
import { openChecked } from "../../../src/checkpoint/training/choose-checkpoint.ts";
import { restoreTensors } from "../../../src/checkpoint/training/restore.ts";
import { CheckpointSaver } from "../../../src/checkpoint/training/saver.ts";
import { requireTensors, TrainingTensors } from "../../../src/checkpoint/training/tensors.ts";
import { configurationOf } from "../../../src/config/resolve.ts";
import { nextTokenMicrobatch, withoutImages } from "../../../src/data/microbatch.ts";
import { topologyOf } from "../../../src/parallel/topology.ts";
import { World } from "../../../src/parallel/world.ts";
import { TokenSlice } from "../../../src/tensor/sequences.ts";
import { openRun } from "../../../src/train/from-configuration.ts";
import { trainStep } from "../../../src/train/step.ts";
import { divisibleModel } from "../../models/small.ts";
import { deviceOfRank, placeOfRank } from "../../parallel/ranks.ts";

export interface LanguageRankOptions {
	/** Configuration keys besides those of the small model. */
	readonly keys: Readonly<Record<string, unknown>>;
	readonly load: string | null;
	readonly optimizer: boolean;
	readonly save: string | null;
	/** Steps [first, last) are trained; a save begins after `saveAfter` of them. */
	readonly first: number;
	readonly last: number;
	readonly saveAfter: number;
}

const options = JSON.parse(process.argv[2]!) as LanguageRankOptions;
using place = await placeOfRank();
using device = await deviceOfRank();
using world = World.join(device, place.run, place.rank, place.backend);
const c = configurationOf({
	...divisibleModel,
	"micro-batch-size": 1,
	"global-batch-size": 8,
	...options.keys,
});
const topology = topologyOf(c);
using run = await openRun(c, world);
const { state } = run;
run.initialise(7);
state.optimizer.refreshMasters();
const { dp: lane } = topology.language.coordinates(world.rank);
using tensors = new TrainingTensors({
	replicas: state.replicas,
	logicalTensors: () => run.logicalTensors(),
	optimizer: state.optimizer,
	writesLoose: state.language!.routers.rank === 0,
});
const everyone = state.world;
if (options.load !== null) {
	const choice = { path: options.load, iteration: null, allowFallback: false };
	using checkpoint = openChecked(choice, everyone, console.log);
	requireTensors(tensors, checkpoint, options.optimizer, everyone);
	restoreTensors(tensors, checkpoint, { optimizer: options.optimizer, elements: 3000 });
	if (options.optimizer) state.scalars.setStep(checkpoint.manifest.iteration!);
}

function sample(index: number) {
	let seed = 1 + index;
	return Int32Array.from({ length: 25 }, () => {
		seed = (seed * 48271 + 11) % 2147483647;
		return seed % 61;
	});
}

using saver =
	options.save === null
		? null
		: new CheckpointSaver({
				store: openStore(options.save, null),
				world: everyone,
				tensors,
				withOptimizer: true,
				// So few that the parameters of this small model take many copies.
				copiedElements: 5000,
				retention: {},
				...{ own: null, lock: null },
				goesOnAfterFailure: false,
				note: () => {},
				warn: () => {},
			});
const perLane = c.globalBatchSize / topology.language.lanes;
const losses: unknown[] = [];
for (let step = options.first; step < options.last; step++) {
	const microbatches = Array.from({ length: perLane }, (_, m) =>
		withoutImages(nextTokenMicrobatch([sample(step * c.globalBatchSize + lane * perLane + m)])),
	);
	const tokens = TokenSlice.of(lane * perLane * c.seqLength, perLane * 24);
	const rates = { learningRate: 1e-3, weightDecay: 0.1 };
	const { loss, gradientNorm } = trainStep(state, { microbatches, tokens, iteration: step, ...rates });
	losses.push({ loss, gradientNorm });
	if (saver?.busy) saver.poll();
	if (step + 1 === options.saveAfter) saver?.start(step + 1, { generator: "test", model: {}, common: {} });
}
saver?.finish();

const digest = new Bun.CryptoHasher("sha256");
for (const { buffer } of tensors.buffers) digest.update(buffer.values.toFloat32());
for (const { master, states } of state.optimizer.shards) {
	for (const tensor of [master, ...states.values()]) digest.update(tensor.toFloat32());
}
for (const { value } of tensors.loose) digest.update(value.toFloat32());
console.log(JSON.stringify({ losses, state: digest.digest("hex") }));
