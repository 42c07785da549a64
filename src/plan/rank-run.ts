/**
 * One rank of a run with all others imagined: its part of the model, its optimizer, and the microbatches of mock data that
 * it would train on. The code that trains builds and runs it, so that what is counted is what a run does.
 */
import { dataLanes, encoderMicroBatchSize, hasEncoder } from "../config/derive.ts";
import type { TrainingConfiguration } from "../config/schema.ts";
import type { ImageSet } from "../data/images.ts";
import type { Microbatch } from "../data/microbatch.ts";
import { MockData, mockGrid, mockImages } from "../data/mock.ts";
import { hybridConfig } from "../models/hybrid/from-configuration.ts";
import { encoderConfig } from "../models/mimo/from-configuration.ts";
import { outputRows, type PatchGrid, patchWidth } from "../models/radio/config.ts";
import type { Device } from "../native/device.ts";
import { UserError } from "../native/errors.ts";
import { type Topology, topologyOf } from "../parallel/topology.ts";
import { World } from "../parallel/world.ts";
import { LanguageRun } from "../train/language-run.ts";
import { mimoSide } from "../train/mimo-run.ts";
import type { Schedule, StepPlace } from "../train/schedule.ts";
import { type TrainingState, trainStep } from "../train/step.ts";
import { imaginedGroup, type Transfer } from "./imagined-group.ts";

/** Parts of a step in order. */
export type Phase = "prepare" | "forward" | "backward" | "update";

export interface RankRun extends Disposable {
	readonly module: "radio_encoder" | "language";
	/** Draws the model's initial values: for a run on a real device. */
	initialise(): void;
	/** Trains one step on `microbatches` of this rank's. */
	step(microbatches: number): void;
}

export interface RankObserver {
	readonly phase: (phase: Phase) => void;
	readonly transfer: (transfer: Transfer) => void;
	/** Rows that other ranks' routers send to this one's experts, over those of an even routing. */
	readonly imbalance: number;
}

/** Image tokens of a sample and the grid of patches they come from; mock data has one image a sample. */
export function imageShape(c: TrainingConfiguration): { readonly grid: PatchGrid; readonly tokens: number } {
	const { tower } = encoderConfig(c);
	const merged = c.pixelShuffle ? 4 : 1;
	const wanted = c.imageSeqLength ?? (c.dynamicResolution ? Math.floor(c.seqLength / 2) : null);
	const patches = wanted === null ? Math.floor(c.imgH / c.patchDim) * Math.floor(c.imgW / c.patchDim) : wanted * merged;
	const grid = mockGrid(patches, c.pixelShuffle);
	return { grid, tokens: outputRows(tower, grid) };
}

/** Microbatches of a step of one lane. */
export function microbatchesOf(c: TrainingConfiguration): number {
	return c.globalBatchSize / (c.microBatchSize * dataLanes(c));
}

/** Throws a UserError where the configuration asks for what no run can do. */
export async function openRank(
	c: TrainingConfiguration,
	device: Device,
	rank: number,
	observer: RankObserver,
): Promise<RankRun> {
	const topology = topologyOf(c);
	if (topology.colocated) throw new UserError("A plan needs encoder and language model on ranks of their own.");
	if (c.llmPp > 1) throw new UserError("A plan knows no pipeline stages yet: set llm-pp to 1.");
	const tokens = hasEncoder(c) ? imageShape(c).tokens : 0;
	const imagination = {
		observe: observer.transfer,
		integers: (length: number) => new Int32Array(length).fill(tokens),
		imbalance: observer.imbalance,
	};
	const world = World.imagined(device, rank, topology.worldSize, (name, ranks) =>
		imaginedGroup(name, ranks, rank, imagination),
	);
	if (!hasEncoder(c)) return await languageRank(c, world, observer);
	return await mimoRank(c, world, topology, observer);
}

async function languageRank(c: TrainingConfiguration, world: World, observer: RankObserver): Promise<RankRun> {
	const run = await LanguageRun.create(c, world);
	return {
		module: "language",
		initialise: () => {
			run.model.initialise(c.seed);
			run.refreshMasters();
		},
		step: (count) => step(c, run.state, textMicrobatches(c, 0, count), observer),
		[Symbol.dispose]: () => run[Symbol.dispose](),
	};
}

async function mimoRank(
	c: TrainingConfiguration,
	world: World,
	topology: Topology,
	observer: RankObserver,
): Promise<RankRun> {
	const side = await mimoSide(world, topology, {
		encoder: encoderConfig(c),
		language: hybridConfig(c),
		imageTokenId: c.imageTokenId,
		frozen: { tower: c.freezeVit, projector: c.freezeProjection, language: c.freezeLm },
		adam: { beta1: c.adamBeta1, beta2: c.adamBeta2, epsilon: c.adamEps },
		clipGrad: c.clipGrad,
		seed: c.seed,
		distributedOptimizer: c.useDistributedOptimizer,
	});
	const shape = imageShape(c);
	return {
		module: side.module === "encoder" ? "radio_encoder" : "language",
		initialise: () => {
			if (side.module === "language") side.model.initialise(c.seed);
			side.state.optimizer.refreshMasters();
		},
		step: (count) => {
			if (side.module === "encoder") step(c, side.state, imageMicrobatches(c, shape.grid, count), observer);
			else step(c, side.state, textMicrobatches(c, shape.tokens, count), observer);
		},
		[Symbol.dispose]: () => {
			for (const one of side.owned) one[Symbol.dispose]();
		},
	};
}

function textMicrobatches(c: TrainingConfiguration, imageTokens: number, count: number): Microbatch[] {
	const data = new MockData({
		seed: c.seed,
		size: count * c.microBatchSize,
		sequenceLength: c.seqLength,
		vocabularySize: c.vocabSize,
		imageTokenId: c.imageTokenId,
		imageTokens,
	});
	return Array.from({ length: count }, (_, index) => data.microbatch(index * c.microBatchSize, c.microBatchSize));
}

function imageMicrobatches(c: TrainingConfiguration, grid: PatchGrid, count: number): ImageSet[] {
	const width = patchWidth({ patchSize: c.patchDim });
	return Array.from({ length: count }, () => mockImages(encoderMicroBatchSize(c), grid, width));
}

/** A step whose phases are told: the last value of a forward pass ends it. */
function step<Batch>(
	c: TrainingConfiguration,
	state: TrainingState<Batch>,
	microbatches: readonly Batch[],
	observer: RankObserver,
): void {
	const schedule: Schedule<Batch> = {
		run: (batches, place: StepPlace, losses, observe = () => {}) => {
			observer.phase("forward");
			state.schedule.run(batches, place, losses, (name, value, index) => {
				observe(name, value, index);
				if (name === "per_token_loss" || name === "encoder.projector") observer.phase("backward");
			});
			observer.phase("update");
		},
	};
	observer.phase("prepare");
	const scheduled = { learningRate: c.lr, weightDecay: c.weightDecay };
	trainStep({ ...state, schedule }, { microbatches, iteration: 0, ...scheduled });
}
